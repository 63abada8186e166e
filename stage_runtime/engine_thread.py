"""The one thread that an Engine runs on: loads it, feeds its scheduler, tells events. The event loop never runs model code."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from stage_runtime.engine import Engine, StageDescription
from stage_runtime.errors import OmnistageError, StageAsleep, StageBusy
from stage_runtime.logs import get_logger
from stage_runtime.scheduler import Event, Load, Scheduler

_log = get_logger(__name__)
R = TypeVar("R")

Command = Callable[[Scheduler[Any]], None]

# The default of 5 ms would let the engine thread keep the interpreter from the event loop for that long at a time.
SWITCH_INTERVAL_S = 0.0005


class EngineThread:
    """Runs an Engine on its own thread.

    `deliver` gets the events of each iteration, on that thread. `loaded` resolves with the description, or with the error that
    loading raised.
    """

    def __init__(
        self,
        create: Callable[[], Engine[Any]],
        *,
        stage: str,
        max_queued: int,
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self.loaded: Future[StageDescription] = Future()
        self.load = Load()
        self._create = create
        self._stage = stage
        self._max_queued = max_queued
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._events: list[Event] = []
        self._asleep = False
        self._engine: Engine[Any] | None = None
        self._thread = threading.Thread(target=self._main, name=f"engine-{stage}", daemon=True)

    def start(self) -> None:
        """Start the thread; it loads the engine at once."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run `command` on the thread before its next step."""
        self._inbox.put(command)

    def call(self, command: Callable[[Scheduler[Any]], R]) -> Future[R]:
        """As `post`, with a result."""
        result: Future[R] = Future()

        def run(scheduler: Scheduler[Any]) -> None:
            try:
                result.set_result(command(scheduler))
            except Exception as error:  # noqa: BLE001  # handed to the caller
                result.set_exception(error)

        self.post(run)
        return result

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self._asleep

    def sleep(self, level: int) -> Future[None]:
        """Put the engine to sleep; raises StageBusy if it has requests. A no-op if it sleeps."""

        def run(scheduler: Scheduler[Any]) -> None:
            if not scheduler.idle:
                raise StageBusy(self._stage, scheduler.load().active + scheduler.load().queued)
            if not self._asleep:
                self._loaded_engine().sleep(level)
                self._asleep = True

        return self.call(run)

    def wake(self) -> Future[None]:
        """Wake the engine; a no-op if it is awake."""

        def run(_scheduler: Scheduler[Any]) -> None:
            if self._asleep:
                self._loaded_engine().wake()
                self._asleep = False

        return self.call(run)

    def check_awake(self) -> None:
        """Raise StageAsleep if the engine sleeps."""
        if self._asleep:
            raise StageAsleep(self._stage)

    def stop(self) -> None:
        """End the thread after the step in progress; waits for at most five seconds."""
        self._inbox.put(None)
        self._thread.join(5)

    def _loaded_engine(self) -> Engine[Any]:
        if self._engine is None:
            raise RuntimeError("the engine is not loaded")
        return self._engine

    def _main(self) -> None:
        try:
            engine = self._create()
            engine.load()
            description = engine.describe()
            scheduler = Scheduler(engine, max_queued=self._max_queued, emit=self._events.append)
        except Exception as error:  # noqa: BLE001  # the process reports it and exits
            if not isinstance(error, OmnistageError):
                _log.exception("engine_load_failed", stage=self._stage)
            self.loaded.set_exception(error)
            return
        self._engine = engine
        self.load = scheduler.load()
        self.loaded.set_result(description)
        self._serve(scheduler)

    def _serve(self, scheduler: Scheduler[Any]) -> None:
        ready = False
        while self._drain(scheduler, block=not ready):
            ready = scheduler.tick()
            self._tell(scheduler)
            if ready:
                scheduler.step()
                self._tell(scheduler)

    def _drain(self, scheduler: Scheduler[Any], *, block: bool) -> bool:
        """Run all commands that wait; if `block`, wait for one (or for the next deadline). False when told to stop."""
        try:
            command = self._inbox.get(block, self._patience(scheduler) if block else None)
            while command is not None:
                command(scheduler)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    @staticmethod
    def _patience(scheduler: Scheduler[Any]) -> float | None:
        deadline = scheduler.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _tell(self, scheduler: Scheduler[Any]) -> None:
        self.load = scheduler.load()
        if self._events:
            events = list(self._events)
            self._events.clear()
            self._deliver(events)
