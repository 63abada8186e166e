"""stage_runtime.supervise and `omnistage up`, with real processes: start, restart, giving up, stop, orphans (case C57)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from stage_runtime import child as child_module
from stage_runtime import config, process_plan
from stage_runtime.addresses import AddressInUse
from stage_runtime.child import (
    Health,
    ProcessFailed,
    RestartPolicy,
    State,
    health_channel,
    rotate,
    rotate_if_large,
    tail,
)
from stage_runtime.config import ConfigError
from stage_runtime.supervise import AlreadyRunning, NotReady, Supervisor

PROGRAMS = Path(__file__).parent / "programs"
FAST = RestartPolicy(pause_initial_s=0.05, pause_max_s=0.1)


@pytest.fixture(autouse=True)
def find_toy_stage(monkeypatch) -> None:
    """Make the module toy_stage known to the processes that tests start."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))


@pytest.fixture
def write(socket_dir):
    """A function that writes the settings of toy stages with the given behaviour, and returns the file."""

    def write_settings(thinker=None, *, names=("thinker", "acoustic", "codec"), module="toy_stage", **other) -> Path:
        stages = {
            name: {
                "kind": "toy",
                "module": module,
                "addresses": [f"unix:{name}.sock"],
                "drain_grace_s": 5,
                "engine": {},
            }
            for name in names
        }
        stages["thinker"]["engine"] = thinker or {}
        tree = {
            "run_dir": "run",
            "router": {"listen": ["unix:r.sock"], "drain_grace_s": 5},
            "pipelines": {"speech": dict.fromkeys(("thinker", "acoustic", "codec"), "thinker")},
            "stages": stages,
        }
        for path, value in other.items():
            *groups, key = path.split("__")
            node = tree
            for group in groups:
                node = node[group]
            node[key] = value
        file = socket_dir / "omnistage.yaml"
        file.write_text(yaml.safe_dump(tree))
        return file

    return write_settings


def supervisor(file, **arguments):
    arguments.setdefault("only", ["thinker"])
    arguments.setdefault("policy", FAST)
    return Supervisor(config.load(file), file, **arguments)


async def until(condition, timeout=15):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- what is started


def plans(file, **arguments):
    return process_plan.plan(config.load(file), file, **arguments)


def test_there_is_a_process_for_the_router_and_each_local_address(write) -> None:
    """Stages with one address keep their name, others get a number; overrides reach every process."""
    file = write(stages__codec={"kind": "toy", "module": "m.n", "addresses": ["a:1", "b:2"]})

    found = plans(file, overrides=["log.level=debug"])

    assert [each.name for each in found] == ["router", "acoustic", "codec-0", "codec-1", "thinker"]
    codec = found[3]
    expected = [
        "-P",
        "-m",
        "m.n",
        "--config",
        str(file),
        "--set",
        "log.level=debug",
        "--stage",
        "codec",
        "--listen",
        "b:2",
    ]
    assert codec.command == (sys.executable, *expected)
    assert (codec.stage, codec.listen, codec.address) == ("codec", ("b:2",), "b:2")
    assert found[0].command[1:] == ("-P", "-m", "services.router", "--config", str(file), "--set", "log.level=debug")


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("voxtral.thinker", "services.thinker"),
        ("voxtral.acoustic", "services.acoustic"),
        ("voxtral.codec", "services.codec"),
    ],
)
def test_known_kinds_need_no_module(write, kind: str, module: str) -> None:
    """Kind decides; a module in the settings wins."""
    stage = {"kind": kind, "addresses": ["a:1"]}

    (known,) = plans(write(stages__codec=stage), only=["codec"])
    (other,) = plans(write(stages__codec=stage | {"module": "mine"}), only=["codec"])

    assert known.command[3] == module
    assert other.command[3] == "mine"


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"kind": "acme.codec", "addresses": ["a:1"]}, "stages.codec.module"),
        ({"kind": "toy", "module": "m", "addresses": ["dns:///codec:1"]}, "stages.codec.listen"),
        ({"kind": "toy", "module": "m", "addresses": ["127.0.0.1:0"]}, "port 0"),
        ({"kind": "toy", "module": "m", "addresses": ["nonsense"]}, "host:port"),
        ({"kind": "toy", "module": "m", "addresses": ["a:1"], "listen": []}, "nothing of codec runs on this machine"),
    ],
    ids=["unknown kind", "dns", "port 0", "no address", "nothing here"],
)
def test_what_cannot_be_started_is_refused_with_the_reason(write, stage, said: str) -> None:
    """Before any process starts."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        plans(write(stages__codec=stage), only=["codec"])


def test_only_unknown_names_are_refused_with_the_known_ones(write) -> None:
    """A typo in --only is not silently nothing."""
    with pytest.raises(ConfigError, match="nothing is called codek here; there are: router, acoustic, codec, thinker"):
        plans(write(), only=["codek"])


def test_health_of_a_wildcard_address_is_asked_at_loopback(write) -> None:
    """0.0.0.0 and [::] are no addresses to dial."""
    file = write(router__listen=["0.0.0.0:50051"])

    assert plans(file, only=["router"])[0].address == "127.0.0.1:50051"


# --- running


async def test_a_whole_system_gets_ready_and_stops_in_order(write, socket_dir) -> None:
    """Router and stages start together; ready means that the router reached the stages; the router stops first."""
    file = write(module="stage_runtime.testing")
    tree = yaml.safe_load(file.read_text())
    for name in tree["stages"]:
        tree["stages"][name]["kind"] = f"fake.{name}"
    tree["pipelines"] = {"speech": {}}
    file.write_text(yaml.safe_dump(tree))
    changes: list[tuple[str, State]] = []
    system = supervisor(file, only=(), on_change=lambda child: changes.append((child.plan.name, child.state)))

    async with system:
        took_s = await system.ready(60)
        pids = [child.pid for child in system.children]
        async with health_channel(system.plans[0].address) as ask:
            healths = [await ask(f"stage/{name}") for name in ("thinker", "acoustic", "codec")]

    assert took_s > 0
    assert healths == [Health.SERVING] * 3
    assert not any(map(runs, pids))
    stopping = [name for name, state in changes if state is State.STOPPING]
    assert stopping[0] == "router"
    assert changes.index(("router", State.STOPPED)) < changes.index((stopping[1], State.STOPPING))
    assert all(child.state is State.STOPPED for child in system.children)
    assert sorted(path.name for path in (socket_dir / "run").rglob("*")) == [
        "acoustic.log",
        "codec.log",
        "logs",
        "router.log",
        "thinker.log",
    ]


async def test_states_are_told_as_they_change(write) -> None:
    """Starting, loading while the process says NOT_SERVING, serving, and the way down."""
    states: list[State] = []
    system = supervisor(write({"load_s": 0.5}), on_change=lambda child: states.append(child.state))

    async with system:
        await system.ready(20)

    assert states == [State.STARTING, State.LOADING, State.SERVING, State.STOPPING, State.STOPPED]


async def test_a_killed_process_is_started_again(write) -> None:
    """It gets another id, the reason is told, and the system is ready again."""
    details: list[str] = []
    system = supervisor(write(), on_change=lambda child: details.append(child.detail))
    async with system:
        await system.ready(20)
        (child,) = system.children
        before = child.pid

        os.kill(before, signal.SIGKILL)
        await until(lambda: child.starts == 2)
        await system.ready(20)

        assert child.pid != before
        assert "it was killed by SIGKILL; again in 0.05 s" in details


async def test_a_process_that_stopped_answering_is_shown_as_such(write, monkeypatch) -> None:
    """It counts as not ready until it answers again."""
    monkeypatch.setattr(child_module, "_HEALTH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(child_module, "_POLL_SERVING_S", 0.1)
    async with supervisor(write()) as system:
        await system.ready(20)
        (child,) = system.children

        os.kill(child.pid, signal.SIGSTOP)
        await until(lambda: child.state is State.SILENT)
        with pytest.raises(NotReady, match="thinker is not answering"):
            await system.ready(0.1)
        os.kill(child.pid, signal.SIGCONT)

        await system.ready(20)


async def test_a_process_that_keeps_crashing_is_given_up(write) -> None:
    """After five crashes; the error names process, exit code and log, and shows what it wrote last."""
    async with supervisor(write({"exit_code": 7})) as system:
        with pytest.raises(ProcessFailed) as caught:
            await system.ready(60)
        (child,) = system.children

    assert child.starts == 5
    assert "thinker crashed 5 times within 60 s, last: it ended with exit code 7" in str(caught.value)
    assert str(system.log_dir / "thinker.log") in str(caught.value)
    assert "ending with 7" in caught.value.log_tail


async def test_old_crashes_are_forgotten(write) -> None:
    """Only crashes within the window count."""
    policy = RestartPolicy(pause_initial_s=0.01, pause_max_s=0.01, max_crashes=2, window_s=0.2)
    async with supervisor(write({"exit_code": 7, "after_s": 0.3}), policy=policy) as system:
        (child,) = system.children
        await until(lambda: child.starts == 3, 30)

        assert child.state is not State.FAILED


@pytest.mark.parametrize("after_s", [0, 0.5])
async def test_faulty_settings_are_not_tried_again(write, after_s: float) -> None:
    """Exit code 2 of the first start ends the matter."""
    async with supervisor(write({"exit_code": 2, "after_s": after_s})) as system:
        with pytest.raises(ProcessFailed, match="thinker cannot start with these settings"):
            await system.ready(60)

        assert system.children[0].starts == 1


async def test_a_system_that_takes_too_long_says_what_is_missing(write) -> None:
    """The error names the processes that do not serve, and what they do."""
    async with supervisor(write({"load_s": 60})) as system:
        with pytest.raises(NotReady, match=r"not ready after 2 s: thinker is (loading|starting)"):
            await system.ready(2)


async def test_a_process_that_does_not_stop_is_killed_in_the_end(write, monkeypatch) -> None:
    """Its grace period and a margin after SIGTERM."""
    monkeypatch.setattr(process_plan, "_STOP_MARGIN_S", 0.5)
    system = supervisor(write({"deaf": True}, stages__thinker__drain_grace_s=0))
    async with system:
        await system.ready(20)
        pid = system.children[0].pid
        begin = time.monotonic()

    assert 0.5 <= time.monotonic() - begin < 3
    assert not runs(pid)


async def test_what_a_process_started_ends_with_it(write) -> None:
    """Helpers of a process that was killed do not stay behind."""
    async with supervisor(write({"helper": True})) as system:
        await system.ready(20)
        (child,) = system.children
        helper = int(re.search(r"helper (\d+)", child.log.read_text())[1])
        assert runs(helper)

        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.starts == 2)

        assert not runs(helper)


async def test_processes_are_out_of_reach_of_ctrl_c(write) -> None:
    """Each is in a session of its own, so that the terminal's SIGINT reaches the supervisor alone."""
    async with supervisor(write()) as system:
        await system.ready(20)
        pid = system.children[0].pid

        assert os.getsid(pid) == pid != os.getsid(0)


async def test_an_exception_in_the_block_stops_everything(write) -> None:
    """It comes out as it is, after the processes are gone."""
    pids = []

    async def use() -> None:
        async with supervisor(write()) as system:
            await system.ready(20)
            pids.append(system.children[0].pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()

    assert len(pids) == 1
    assert not runs(pids[0])


async def test_a_taken_address_is_noticed_before_anything_starts(write, socket_dir) -> None:
    """The foreign process is left alone, and the run directory is free again."""
    file = write()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(socket_dir / "thinker.sock"))
        foreign.listen()
        system = supervisor(file)

        with pytest.raises(AddressInUse, match=r"thinker\.sock is in use"):
            async with system:
                pass

        assert system.children == []
    async with supervisor(file) as again:
        await again.ready(20)


async def test_a_run_directory_has_one_supervisor(write) -> None:
    """A second one is refused with the id of the first, also for other stages; afterwards the directory is free."""
    file = write()
    async with supervisor(file) as system:
        begin = time.monotonic()
        with pytest.raises(AlreadyRunning, match=rf"\(process {os.getpid()}\)"):
            async with supervisor(file, only=["codec"]):
                pass
        assert time.monotonic() - begin < 1
        await system.ready(20)

    async with supervisor(file, only=["codec"]) as system:
        await system.ready(20)


async def test_logs_of_the_run_before_are_kept(write) -> None:
    """A start begins a new log and keeps one old; a restart goes on in the same."""
    file = write()
    for _ in range(2):
        async with supervisor(file, overrides=["log.level=debug"]) as system:
            await system.ready(20)

    log = system.children[0].log
    assert log.read_text().count("start of thinker with ['log.level=debug']") == 1
    assert log.with_name("thinker.log.1").read_text().count("start of thinker") == 1


def test_a_log_that_grew_too_large_is_emptied_under_its_writer(tmp_path: Path, monkeypatch) -> None:
    """The older part moves to another file; the process goes on writing to the same."""
    monkeypatch.setattr(child_module, "LOG_LIMIT_BYTES", 100)
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 90)
        rotate_if_large(log)
        assert log.stat().st_size == 90
        writer.write(b"y" * 20)
        rotate_if_large(log)
        writer.write(b"new\n")

    assert log.read_text() == "new\n"
    assert log.with_name("a.log.1").stat().st_size == 110


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    """Also of a large one with broken text, and nothing of a log that is not there."""
    log = tmp_path / "logs" / "a.log"
    assert tail(log) == []
    rotate(log)
    log.write_bytes(b"\xff" * 100_000 + b"\n" + b"".join(b"line %d\n" % index for index in range(100)))

    assert tail(log, 3) == ["line 97", "line 98", "line 99"]


# --- the command


def omnistage_up(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from omnistage.cli.up import up; up()", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(process: subprocess.Popen[str], word: str) -> str:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError("".join(lines) + process.stderr.read())


@pytest.fixture
def up(write):
    """A function that starts `omnistage up` with toy stages; all of it is killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start_up(file: Path, *arguments: object) -> subprocess.Popen[str]:
        started.append(omnistage_up("--config", file, *arguments))
        return started[-1]

    yield start_up
    for process in started:
        for each in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else ():
            each.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_tells_its_progress_and_stops_with_code_0(write, up, number: signal.Signals) -> None:
    """A line for each change, one when all serve; after the signal nothing is left."""
    process = up(write(), "--only", "thinker", "--only", "codec")
    text = read_until(process, "ready")
    children = psutil.Process(process.pid).children()

    process.send_signal(number)
    rest, errors = process.communicate(timeout=10)

    assert process.returncode == 0
    assert re.search(r"^thinker +starting +unix:", text, re.MULTILINE)
    assert re.search(r"^codec +serving +unix:.*process \d+$", text, re.MULTILINE)
    assert re.search(r"^ready after \d+\.\d s; logs in ", text, re.MULTILINE)
    assert re.search(r"^thinker +stopped$", rest, re.MULTILINE)
    assert errors == ""
    assert len(children) == 2
    assert not any(runs(child.pid) for child in children)


def test_the_second_signal_kills_everything(write, up) -> None:
    """Although a stage needs long to stop, all is gone within two seconds; code 130."""
    process = up(write({"stop_s": 30}, stages__thinker__drain_grace_s=60), "--only", "thinker")
    read_until(process, "ready")
    (child,) = psutil.Process(process.pid).children()

    process.send_signal(signal.SIGTERM)
    read_until(process, "stopping")
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)

    assert process.wait(5) == 130
    while runs(child.pid):
        assert time.monotonic() - begin < 2
        time.sleep(0.02)


def test_a_signal_while_loading_stops_at_once(write, up) -> None:
    """One need not wait for the end of loading."""
    process = up(write({"load_s": 60}), "--only", "thinker")
    read_until(process, "loading")

    process.send_signal(signal.SIGINT)

    assert process.wait(5) == 0


def test_up_gives_up_with_the_last_lines_of_the_log(write, up) -> None:
    """Exit code 1; the other processes are stopped."""
    process = up(write({"exit_code": 2}), "--only", "thinker", "--only", "codec")

    out, errors = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "last lines of thinker:" in errors
    assert "  ending with 2" in errors
    assert "error: thinker cannot start with these settings; its log is " in errors
    assert re.search(r"^codec +stopped$", out, re.MULTILINE)


def test_up_gives_up_when_it_takes_too_long(write, up) -> None:
    """Exit code 1 and what is missing."""
    process = up(write({"load_s": 60}), "--only", "thinker", "--ready-timeout", "1.5")

    _, errors = process.communicate(timeout=20)

    assert process.returncode == 1
    assert re.search(r"error: not ready after 1\.5 s: thinker is (starting|loading)", errors)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "codek"], "nothing is called codek here"),
        (["--set", "nonsense=1"], "nonsense: unknown key"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml does not exist"),
    ],
    ids=["only", "set", "config"],
)
def test_up_refuses_faulty_settings_with_code_2(write, up, arguments, said: str) -> None:
    """Before anything starts, in one line."""
    process = up(write(), *arguments)

    _, errors = process.communicate(timeout=10)

    assert process.returncode == 2
    assert errors.startswith("error: ")
    assert said in errors
    assert errors.count("\n") == 1


def test_a_second_up_is_refused(write, up) -> None:
    """Exit code 2 within seconds; the first is not disturbed."""
    file = write()
    first = up(file, "--only", "thinker")
    read_until(first, "ready")

    second = up(file, "--only", "thinker")
    _, errors = second.communicate(timeout=10)

    assert second.returncode == 2
    assert f"omnistage is up in {file.parent}/run already (process {first.pid})" in errors
    first.send_signal(signal.SIGTERM)
    assert first.wait(10) == 0


@pytest.mark.parametrize(
    ("behave", "word"),
    [({}, "ready"), ({"load_s": 60}, "loading"), ({"block_s": 60}, "starting"), ({"busy": True}, "ready")],
    ids=["idle", "loading", "blocked", "busy"],
)
def test_killing_up_leaves_no_orphans_and_it_can_start_again(write, up, behave, word: str) -> None:
    """After kill -9 all processes are gone within ten seconds, and an immediate start on the same addresses works."""
    file = write(behave)
    first = up(file, "--only", "thinker", "--only", "codec")
    read_until(first, word)
    time.sleep(1)  # until the watch of the parent is in place
    children = psutil.Process(first.pid).children(recursive=True)
    assert len(children) == 2

    first.kill()
    first.wait()
    write()
    second = up(file, "--only", "thinker", "--only", "codec")
    read_until(second, "ready")

    assert not any(runs(child.pid) for child in children)
    second.send_signal(signal.SIGTERM)
    assert second.wait(10) == 0
