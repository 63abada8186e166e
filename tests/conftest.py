"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import SystemRandom

import psutil
import pytest

# The longest path that a Unix socket can be bound to.
MAX_SOCKET_PATH_BYTES = 107
# Below the range from which the kernel takes ports for outgoing connections, so that none takes a port before its server does.
PORTS = range(20_000, 32_000)

# Not OMNISTAGE_...: such variables are settings.
_TEST_MARK = "OMNI_TEST"


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function whose every call returns another TCP port that nothing listens on at the loopback address."""
    random = SystemRandom()  # pytest-randomly seeds the usual one alike in every test
    given: set[int] = set()

    def find() -> int:
        while True:
            port = random.choice(PORTS)
            with socket.socket() as probe:
                if port not in given and probe.connect_ex(("127.0.0.1", port)) != 0:
                    given.add(port)
                    return port

    return find


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """An empty folder, only ours, whose path is short enough for Unix sockets (tmp_path is not); removed after the test."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp" if Path("/tmp").is_dir() else None))
    assert len(os.fsencode(folder)) + 40 < MAX_SOCKET_PATH_BYTES
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    """Fail a test that leaves processes behind, orphans included: all that it starts inherit a mark in their environment."""
    mark = uuid.uuid4().hex
    before = set(psutil.pids())
    os.environ[_TEST_MARK] = mark
    yield
    os.environ.pop(_TEST_MARK, None)
    left = {process: command for pid in set(psutil.pids()) - before for process, command in _started_here(pid, mark)}
    _, alive = psutil.wait_procs(left, timeout=2)
    for process in alive:
        process.kill()
    assert not alive, f"the test left processes behind: {[left[process] for process in alive]}"


def _started_here(pid: int, mark: str) -> Iterator[tuple[psutil.Process, str]]:
    """The process and its command line, if a test with this mark, or this process itself, started it."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        ours = process.ppid() == os.getpid() or process.environ().get(_TEST_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return
    # multiprocessing keeps its helper until the interpreter ends; without a command line it has ended already
    if ours and command and "multiprocessing.resource_tracker" not in command:
        yield process, command
