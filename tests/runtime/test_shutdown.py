"""stage_runtime.shutdown with real processes: signals (case C56) and the death of the parent (case C57)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stage_runtime import shutdown as shutdown_module
from stage_runtime.shutdown import Shutdown

PROGRAM = "wait_for_stop.py"


def wait_for_end(process, timeout):
    """The exit code of a process, and how long it took to end."""
    begin = time.monotonic()
    code = process.wait(timeout)
    return code, time.monotonic() - begin


def ends(process, within_s):
    """Whether a process that is not our child ends in time; a zombie has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not runs(process):
            return True
        time.sleep(0.02)
    return False


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ready(process):
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(start, number: signal.Signals) -> None:
    """The process is told, and ends in its own way with code 0."""
    process = start(PROGRAM, "idle")
    ready(process)

    process.send_signal(number)

    assert process.stdout.readline() == f"stopping {number.name}\n"
    assert wait_for_end(process, 5)[0] == 0


@pytest.mark.parametrize("state", ["stubborn", "blocked", "busy"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_the_process_at_once(start, state: str, number: signal.Signals) -> None:
    """Code 128 + number within a second, whatever the process does, even with a blocked event loop."""
    process = start(PROGRAM, state)
    ready(process)

    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(number)

    code, took_s = wait_for_end(process, 5)
    assert code == 128 + number
    assert took_s < 1


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root and unshare")
@pytest.mark.parametrize("signals", [1, 2])
def test_signals_work_for_process_one(signals: int) -> None:
    """In a process namespace of its own, as in a container, where signals without a handler are lost."""
    state = "idle" if signals == 1 else "stubborn"
    program = str(Path(__file__).parent / "programs" / PROGRAM)
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, program, state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outer:
        ready(outer)
        (inner,) = psutil.Process(outer.pid).children()

        for _ in range(signals):
            inner.send_signal(signal.SIGTERM)
            time.sleep(0.3)

        assert outer.wait(5) == (0 if signals == 1 else 143)


@pytest.mark.parametrize(
    ("state", "within_s"), [("idle", 1), ("loading", 1), ("busy", 4), ("stubborn", 4), ("blocked", 4)]
)
def test_a_child_ends_when_its_parent_is_killed(start, state: str, within_s: float) -> None:
    """At once if it can, and two seconds later the hard way, also with the main thread deep in a library."""
    parent = start("parent.py", state)
    pid, word = parent.stdout.readline().split()
    assert word == "ready"
    child = psutil.Process(int(pid))

    parent.kill()
    parent.wait()

    assert ends(child, within_s)


def test_a_child_without_grace_still_gets_its_two_seconds(start) -> None:
    """A child that needs time to stop is not killed at once."""
    parent = start("parent.py", "stubborn")
    child = psutil.Process(int(parent.stdout.readline().split()[0]))

    parent.kill()
    parent.wait()
    time.sleep(1)

    assert runs(child)
    assert ends(child, 3)


@pytest.mark.parametrize("state", ["idle", "loading", "stubborn"])
def test_a_child_whose_parent_was_gone_before_it_asked_ends(start, state: str) -> None:
    """The kernel sends nothing then."""
    parent = start("parent.py", state, "--wrong")

    assert wait_for_end(parent, 5)[1] < 4


def test_a_living_parent_is_no_reason_to_end(start) -> None:
    """The watch does nothing as long as the parent lives."""
    parent = start("parent.py", "idle")
    child = psutil.Process(int(parent.stdout.readline().split()[0]))

    time.sleep(1.5)

    assert runs(child)
    child.terminate()
    assert parent.wait(5) == 0


@pytest.mark.parametrize("missing", ["prctl", "pidfd", "both"])
def test_the_watch_works_without_help_of_the_kernel(missing: str) -> None:
    """On systems without prctl or pidfd the parent's id is looked at twice a second."""
    program = """
import asyncio, os, sys
from stage_runtime import shutdown
if sys.argv[1] in ("prctl", "both"):
    shutdown._signal_at_parent_death = lambda: False
if sys.argv[1] in ("pidfd", "both"):
    def refuse(pid):
        raise OSError("no such call")
    shutdown.os.pidfd_open = refuse

async def main():
    with shutdown.Shutdown() as told:
        print("ready", flush=True)
        await told.wait()

if os.fork() == 0:
    shutdown.watch_parent(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
    asyncio.run(main())
else:
    sys.stdin.read()
    os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, missing], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        ready(parent)
        (child,) = psutil.Process(parent.pid).children()

        parent.stdin.close()
        parent.wait(5)

        assert ends(child, 3)


async def test_handlers_are_put_back() -> None:
    """After the block the process handles signals as before."""
    before = [signal.getsignal(number) for number in shutdown_module.SIGNALS]

    with Shutdown():
        assert [signal.getsignal(number) for number in shutdown_module.SIGNALS] != before

    assert [signal.getsignal(number) for number in shutdown_module.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


async def test_a_signal_wakes_the_waiting_coroutine() -> None:
    """Within the same process: `wait` returns, `requested` and `received` tell."""
    with Shutdown() as shutdown:
        assert not shutdown.requested
        os.kill(os.getpid(), signal.SIGTERM)

        await asyncio.wait_for(shutdown.wait(), 2)

        assert shutdown.requested
        assert shutdown.received is signal.SIGTERM


async def test_other_signals_are_left_to_their_handlers() -> None:
    """A handler for SIGUSR1 goes on working and is no reason to stop."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with Shutdown() as shutdown:
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0.1)
            assert not shutdown.requested
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


async def test_stopping_can_be_asked_for_without_a_signal() -> None:
    """`request` does what a first signal does."""
    with Shutdown() as shutdown:
        shutdown.request()

        await asyncio.wait_for(shutdown.wait(), 1)

    assert shutdown.received is None
