"""One supervised process: started, watched by its health, restarted after a crash, stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from stage_runtime.grpc_options import channel_options
from stage_runtime.process_plan import ProcessPlan

EXIT_CONFIG = 2
LOG_LIMIT_BYTES = 32 * 2**20
TAIL_LINES = 20

_HEALTH_TIMEOUT_S = 2.0
_POLL_STARTING_S = 0.1
_POLL_SERVING_S = 1.0
_SILENT_POLLS = 3
_TAIL_BYTES = 16_384
_MESSAGE_BYTES = 2**20


class State(enum.Enum):
    """What a supervised process does, as far as its supervisor sees."""

    STARTING = "starting"  # it runs but does not answer yet
    LOADING = "loading"  # it answers NOT_SERVING
    SERVING = "serving"
    NOT_SERVING = "not serving"  # it served before: it is asleep, or draining
    SILENT = "not answering"  # it runs, and answered before
    RESTARTING = "restarting"  # it crashed and will be started again
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"  # given up


class ProcessFailed(Exception):
    """A process was given up. The message says why; `log_tail` holds the last lines it wrote."""

    def __init__(self, name: str, message: str, log: Path, log_tail: Sequence[str]) -> None:
        super().__init__(f"{name} {message}; its log is {log}")
        self.name = name
        self.log_tail = tuple(log_tail)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a process that crashed is started again: after a pause that doubles, until it crashed too often in `window_s`."""

    pause_initial_s: float = 0.5
    pause_max_s: float = 10.0
    max_crashes: int = 5
    window_s: float = 60.0

    def pause_s(self, crashes: int) -> float:
        """Pause after that many crashes within the window."""
        return min(self.pause_initial_s * 2.0 ** (crashes - 1), self.pause_max_s)


class Child:
    """A process of a plan. `run` keeps it running until `stop`; all methods but `kill` belong to the event loop's thread."""

    def __init__(
        self,
        plan: ProcessPlan,
        log: Path,
        *,
        policy: RestartPolicy,
        inherited_fds: Sequence[int] = (),
        on_change: Callable[[Child], None],
    ) -> None:
        """`on_change` is called after every change of `state` or `detail`."""
        self.plan = plan
        self.log = log
        self.state = State.STOPPED
        self.detail = ""
        self.starts = 0
        self._policy = policy
        self._inherited_fds = tuple(inherited_fds)
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Id of the running process."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Start it, and again after every crash, until `stop`. Raises ProcessFailed when it is given up."""
        crashes: deque[float] = deque()
        rotate(self.log)
        while not self._stopping.is_set():
            code = await self._run_once()
            if self._stopping.is_set():
                break
            if code == EXIT_CONFIG and self.starts == 1:
                self._give_up("cannot start with these settings")
            now = time.monotonic()
            crashes.append(now)
            while now - crashes[0] > self._policy.window_s:
                crashes.popleft()
            if len(crashes) >= self._policy.max_crashes:
                self._give_up(f"crashed {len(crashes)} times within {self._policy.window_s:g} s, last: {_ending(code)}")
            pause_s = self._policy.pause_s(len(crashes))
            self._change(State.RESTARTING, f"{_ending(code)}; again in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        self._change(State.STOPPED)

    async def stop(self) -> None:
        """Let it stop in order; kill it if it takes longer than the plan allows. Returns when it is gone."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        self._change(State.STOPPING)
        await self._stop_watching()  # first: gRPC writes to stderr when a server takes its leave
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.plan.stop_s)
        except TimeoutError:
            self._change(State.STOPPING, f"killed: it did not stop within {self.plan.stop_s:g} s")
        finally:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill it and all that it started, at once. May be called from any thread."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self.log.open("ab", buffering=0) as log:
            return await asyncio.create_subprocess_exec(
                *self.plan.command,
                "--parent-pid",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
                pass_fds=self._inherited_fds,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            )

    async def _run_once(self) -> int:
        """Run the process until it ends; its exit code."""
        self.starts += 1
        try:
            self._process = await self._spawn()
        except OSError as error:
            self._give_up(f"cannot be started: {error}")
        if self._stopping.is_set():  # told while it was being started
            self.kill()
        self._change(State.STARTING)
        self._watching = asyncio.create_task(self._watch(), name=f"health of {self.plan.name}")
        try:
            return await self._process.wait()
        finally:
            await self._stop_watching()
            self.kill()  # what it left behind
            self._process = None

    async def _watch(self) -> None:
        """Follow the health of the process, and keep its log from growing without bound."""
        served, silent = False, 0
        async with health_channel(self.plan.address) as ask:
            while not self._stopping.is_set():
                health = await ask("")
                served = served or health is Health.SERVING
                silent = silent + 1 if health is Health.NO_ANSWER else 0
                if health is Health.SERVING:
                    self._change(State.SERVING)
                elif health is Health.NOT_SERVING:
                    self._change(State.NOT_SERVING if served else State.LOADING)
                elif silent >= _SILENT_POLLS and self.state is not State.STARTING:
                    self._change(State.SILENT)
                if served:
                    await asyncio.to_thread(rotate_if_large, self.log)
                await asyncio.sleep(_POLL_SERVING_S if served else _POLL_STARTING_S)

    async def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def _give_up(self, message: str) -> NoReturn:
        self._change(State.FAILED, message)
        raise ProcessFailed(self.plan.name, message, self.log, tail(self.log))

    def _change(self, state: State, detail: str = "") -> None:
        if (state, detail) != (self.state, self.detail):
            self.state, self.detail = state, detail
            self._on_change(self)


class Health(enum.Enum):
    """An answer about the health of a name."""

    SERVING = enum.auto()
    NOT_SERVING = enum.auto()
    UNKNOWN_NAME = enum.auto()
    NO_ANSWER = enum.auto()


AskHealth = Callable[[str], Awaitable[Health]]


@contextlib.asynccontextmanager
async def health_channel(address: str) -> AsyncIterator[AskHealth]:
    """A function that asks the process at `address` for the health of a name."""
    options = channel_options(_MESSAGE_BYTES, max_reconnect_backoff_s=0.5, local_subchannel_pool=True)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        async def ask(name: str) -> Health:
            try:
                response = await check(health_pb2.HealthCheckRequest(service=name), timeout=_HEALTH_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return Health.UNKNOWN_NAME if error.code() is grpc.StatusCode.NOT_FOUND else Health.NO_ANSWER
            serving = response.status == health_pb2.HealthCheckResponse.SERVING
            return Health.SERVING if serving else Health.NOT_SERVING

        yield ask


def tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log file; none if it does not exist."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def rotate(log: Path) -> None:
    """Start a log anew; what was there is kept as NAME.log.1."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))


def rotate_if_large(log: Path) -> None:
    """Keep a log that a process writes to below LOG_LIMIT_BYTES, roughly; the older part goes to NAME.log.1."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_LIMIT_BYTES:
            # The process appends to this very file: it is emptied, not replaced.
            log.with_name(f"{log.name}.1").write_bytes(log.read_bytes())
            os.truncate(log, 0)


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
