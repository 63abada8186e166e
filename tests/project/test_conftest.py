"""The fixtures of tests/conftest.py."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(60)']"
CHILD = f"subprocess.Popen({SLEEPER}).returncode = 0"
CHILD_WITHOUT_MARK = f"subprocess.Popen({SLEEPER}, env={{}}).returncode = 0"
ORPHAN = (
    f"""subprocess.run([sys.executable, '-c', "import subprocess, sys; subprocess.Popen({SLEEPER}).returncode = 0"])"""
)
WELL_BEHAVED = "subprocess.run([sys.executable, '-c', ''])"


def _run_test(folder: Path, statement: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder)
    (folder / "test_it.py").write_text(f"import subprocess, sys\n\ndef test_it():\n    {statement}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "statement", [CHILD, CHILD_WITHOUT_MARK, ORPHAN], ids=["child", "child without mark", "orphan"]
)
def test_a_test_that_leaves_a_process_behind_fails(tmp_path: Path, statement: str) -> None:
    """A test errors when a process that it started, or an orphan of such a process, outlives it."""
    result = _run_test(tmp_path, statement)

    assert result.returncode == 1, result.stdout
    assert "the test left processes behind" in result.stdout
    assert "time.sleep(60)" in result.stdout


def test_a_test_whose_processes_ended_passes(tmp_path: Path) -> None:
    """A test that waits for the processes it started passes."""
    result = _run_test(tmp_path, WELL_BEHAVED)

    assert result.returncode == 0, result.stdout


def test_free_ports_differ_and_can_be_bound(free_port: Callable[[], int]) -> None:
    """Every call gives another port, and a server can listen on each."""
    ports = [free_port() for _ in range(20)]

    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_socket_dir_is_short_and_private(socket_dir: Path) -> None:
    """A Unix socket with a name of 40 bytes can be bound in the folder, which nobody else may enter."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(socket_dir / ("s" * 40)))

    assert socket_dir.stat().st_mode & 0o777 == 0o700
