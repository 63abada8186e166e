"""Whole systems of real processes: a router and stages on Unix sockets."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from omnistage import Client, OmnistageError

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "embedded" / "voxtral-golden"
MODULES = {
    "voxtral.thinker": "services.thinker",
    "voxtral.acoustic": "services.acoustic",
    "voxtral.codec": "services.codec",
}


class System:
    """Running processes of one installation."""

    def __init__(self, folder: Path, settings: dict):
        self.folder = folder
        self.settings = settings
        self.file = folder / "omnistage.yaml"
        self.file.write_text(yaml.safe_dump(settings))
        self.address = f"unix:{folder}/router.sock"
        self.processes = {}

    def start(self, name, *arguments):
        """Start the router or one replica of a stage."""
        log = (self.folder / f"{name}.log").open("ab")
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OMNI_TEST")}
        command = [sys.executable, "-m", *arguments, "--config", str(self.file)]
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=ROOT)
        log.close()

    def start_stage(self, stage, replica=0):
        """Start one replica of a stage."""
        settings = self.settings["stages"][stage]
        module = MODULES.get(settings["kind"], "stage_runtime.testing")
        address = settings["addresses"][replica]
        self.start(f"{stage}{replica}", module, "--stage", stage, "--listen", address)

    def wait(self, condition, timeout_s=40.0):
        """Poll until a condition on the client holds."""
        end = time.monotonic() + timeout_s
        with Client(self.address) as client:
            while True:
                with contextlib.suppress(OmnistageError):
                    if condition(client):
                        return
                assert time.monotonic() < end, self.logs()
                time.sleep(0.05)

    def wait_serving(self):
        """Wait until every replica is up."""
        self.wait(lambda client: all(r.state == "up" for stage in client.stages() for r in stage.replicas))

    def logs(self):
        """The last lines of every log."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))

    def stop(self):
        """Stop everything in order; kill what does not."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def embedded_settings(folder: Path, replicas: int = 1) -> dict:
    """The embedded installation on sockets in a folder."""
    settings = yaml.safe_load((ROOT / "omnistage.yaml").read_text())
    settings["router"]["listen"] = [f"unix:{folder}/router.sock"]
    settings["router"]["drain_grace_s"] = 2
    for name, stage in settings["stages"].items():
        stage |= {
            "model": str(MODEL),
            "addresses": [f"unix:{folder}/{name}{replica}.sock" for replica in range(replicas)],
            "drain_grace_s": 2,
        }
    return settings


def fake_settings(folder: Path, **engines) -> dict:
    """A speech pipeline of fake stages; engines give their settings by role."""
    return {
        "router": {
            "listen": [f"unix:{folder}/router.sock"],
            "drain_grace_s": 5,
            "lane": {"heartbeat_interval_s": 0.5, "missed_heartbeats": 3},
        },
        "pipelines": {"speech": {"kind": "speech"}},
        "stages": {
            role: {
                "kind": f"fake.{role}",
                "addresses": [f"unix:{folder}/{role}0.sock"],
                "engine": engines.get(role, {}),
                "drain_grace_s": 1,
            }
            for role in ("thinker", "acoustic", "codec")
        },
    }


@contextlib.contextmanager
def running(make_settings):
    """Start a whole system and stop it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    system = System(folder, make_settings(folder))
    try:
        system.start("router", "services.router")
        for stage, settings in system.settings["stages"].items():
            for replica in range(len(settings["addresses"])):
                system.start_stage(stage, replica)
        system.wait_serving()
        yield system
    finally:
        system.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def embedded():
    """The embedded models, one replica of each stage."""
    with running(embedded_settings) as system:
        yield system


@pytest.fixture
def start_embedded():
    """Starts embedded systems with some number of replicas."""
    return lambda replicas: running(lambda folder: embedded_settings(folder, replicas))


@pytest.fixture
def start_fakes():
    """Starts systems of fake stages; arguments are engine settings by role."""
    return lambda change=lambda settings: settings, **engines: running(
        lambda folder: change(fake_settings(folder, **engines))
    )
