"""Install into .venv what `make` needs, at the versions of constraints.txt: `runtime`, or `dev` on top of it.

Uses the standard library alone, as nothing is installed yet. pip shows no progress when its output is no terminal and takes
minutes over large packages, so this script then says every few seconds that the work goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# The pip that is installed first also pins what packages are built with.
PINS = ["--constraint", "constraints.txt"]
BUILD_PINS = ["--build-constraint", "constraints.txt"]
STEPS = {
    "runtime": [
        # The pip that comes with Python may be older than dependency groups (25.1).
        ("pip", ["--upgrade", "pip>=25.1"]),
        (
            "omnistage with its stages (PyTorch is large: this may take minutes)",
            [*BUILD_PINS, "--editable", ".[stages]"],
        ),
    ],
    "dev": [("the tools for tests and checks", [*BUILD_PINS, "--group", "dev"])],
}
HEARTBEAT_S = 10.0


def has_pip() -> bool:
    """Whether .venv is there and whole."""
    if not PYTHON.exists():
        return False
    return subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def run_visibly(command: list[str | Path]) -> None:
    """Run `command` and say that it goes on while it is silent. Raises SystemExit with its status if it fails."""
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process:
        while True:
            try:
                status = process.wait(timeout=None if sys.stdout.isatty() else HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                print(f"    ... still installing, {time.monotonic() - start:.0f} s", flush=True)
    if status != 0:
        print(f"the command failed with exit status {status}: {' '.join(map(str, command))}", file=sys.stderr)
        raise SystemExit(1)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(STEPS))
    what = parser.parse_args().what
    if not has_pip():
        print(f"==> creating {VENV.name} with Python {sys.version.split()[0]}", flush=True)
        venv.create(VENV, clear=True, with_pip=True)
    for title, arguments in STEPS[what]:
        print(f"==> installing {title}", flush=True)
        run_visibly([PYTHON, "-m", "pip", "install", *PINS, *arguments])


if __name__ == "__main__":
    main()
