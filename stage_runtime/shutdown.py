"""Stopping: signals, and the death of the process that started us.

Both work from threads of their own, so that neither a blocked event loop nor a main thread deep in a library (loading weights,
say) keeps a process alive, as long as that library lets other threads run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from stage_runtime import logs

_log = logs.get_logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ORPHAN_GRACE_S = 2.0

_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Shutdown:
    """Waits for the first SIGTERM or SIGINT, and ends the process at once with code 128 + number at the second.

    A context manager for the main thread with a running event loop. Works as process 1 of a container too, where signals without
    a handler are lost.
    """

    def __init__(self, *, at_second: Callable[[], None] | None = None) -> None:
        """`at_second` runs in another thread just before the second signal ends the process; it must not block."""
        self._at_second = at_second
        self._event = asyncio.Event()
        self._signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the process was told to stop."""
        return self._event.is_set()

    @property
    def received(self) -> signal.Signals | None:
        """The first signal, or None."""
        return self._signal

    async def wait(self) -> None:
        """Wait until the process is told to stop."""
        await self._event.wait()

    def request(self) -> None:
        """Ask for the same as a first signal does. For the event loop's thread."""
        self._event.set()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        # The interpreter's own handler, in C, writes the number of each signal to this socket, whatever the main thread does.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        while received := self._reader.recv(1):
            if received[0] not in SIGNALS:
                continue  # another handler's
            number = signal.Signals(received[0])
            if self._signal is not None:
                self._end(number)
            self._signal = number
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends anyway
                self._loop.call_soon_threadsafe(self._told, number)

    def _told(self, number: signal.Signals) -> None:
        self._event.set()
        _log.info("stop_requested", signal=number.name)

    def _end(self, number: signal.Signals) -> NoReturn:
        """Without a log entry: whoever reads the logs may be what hangs."""
        if self._at_second is not None:
            self._at_second()
        os._exit(128 + number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Only the C handler's write counts."""


def watch_parent(parent_pid: int, *, grace_s: float = ORPHAN_GRACE_S) -> None:
    """End this process when its parent `parent_pid` is gone: SIGTERM to itself, and after `grace_s` a hard end with code 143.

    For processes that a supervisor started and told its own id. On Linux the kernel sends the signal, also while no other thread
    gets to run. It does so too when only the parent's *thread* that started us ends: supervisors start processes from a thread
    that lives as long as they do.
    """
    signalled_by_kernel = sys.platform == "linux" and _signal_at_parent_death()
    threading.Thread(
        target=_end_with_parent, args=(parent_pid, grace_s, signalled_by_kernel), name="parent watch", daemon=True
    ).start()
    if os.getppid() != parent_pid:  # it was gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)


def _signal_at_parent_death() -> bool:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) == 0)


def _end_with_parent(parent_pid: int, grace_s: float, signalled_by_kernel: bool) -> NoReturn:  # noqa: FBT001
    _wait_for_parent(parent_pid)
    if not signalled_by_kernel:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(128 + signal.SIGTERM)


def _wait_for_parent(parent_pid: int) -> None:
    """Return when `parent_pid` is no longer our parent."""
    try:
        parent = os.pidfd_open(parent_pid)
    except (AttributeError, OSError):  # not Linux, an old kernel, or gone already
        parent = None
    poll = select.poll()
    if parent is not None:
        poll.register(parent, select.POLLIN)
    while os.getppid() == parent_pid:
        if parent is None:
            time.sleep(_POLL_S)
        else:
            poll.poll(_POLL_S * 1000)
    if parent is not None:
        os.close(parent)
