"""Run all processes of an installation on this machine: `omnistage up`, and whoever wants a whole system for a while.

    async with Supervisor(installation, config_file) as system:
        await system.ready(timeout_s=60)
        ...

Leaving the block stops the router first, so that it can finish what it has, then the stages. If this process dies, its children
notice and end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from stage_runtime.child import Child, Health, ProcessFailed, RestartPolicy, State, health_channel
from stage_runtime.config import ConfigError, Installation
from stage_runtime.file_lock import FileLock
from stage_runtime.process_plan import ROUTER, ProcessPlan, check_free, plan

__all__ = ["AlreadyRunning", "Child", "NotReady", "ProcessFailed", "RestartPolicy", "State", "Supervisor"]

# Children of a supervisor that was killed need this long to notice it and to end.
_ORPHANS_S = 5.0
_POLL_S = 0.1


class AlreadyRunning(ConfigError):
    """Another supervisor uses the same run directory."""


class NotReady(Exception):
    """The system did not get ready in time; the message says what is missing."""


class Supervisor:
    """The local processes of an installation, from `async with` to its end.

    Starts everything at once; restarts what crashes; gives up, see `failed`, what cannot run.
    """

    def __init__(  # noqa: PLR0913 - options by name, with defaults
        self,
        installation: Installation,
        config_file: Path,
        *,
        overrides: Sequence[str] = (),
        only: Sequence[str] = (),
        policy: RestartPolicy | None = None,
        on_change: Callable[[Child], None] | None = None,
    ) -> None:
        """See `stage_runtime.process_plan.plan` for the first arguments; `on_change` is told every change of a process.

        Raises:
            ConfigError: The settings do not say what to start here.
        """
        self.plans: list[ProcessPlan] = plan(installation, config_file, overrides=overrides, only=only)
        self.children: list[Child] = []
        self._run_dir = installation.run_dir
        self._policy = policy or RestartPolicy()
        self.on_change = on_change
        self._serving = asyncio.Event()  # all of them
        self._tasks: dict[asyncio.Task[None], Child] = {}
        self._lock: FileLock | None = None

    @property
    def log_dir(self) -> Path:
        """Folder with one log file for each process."""
        return self._run_dir / "logs"

    async def __aenter__(self) -> Self:
        """Start all processes. Raises AlreadyRunning, or AddressInUse if another process has one of the addresses."""
        self._lock = await _lock(self._run_dir)
        try:
            await asyncio.to_thread(check_free, self.plans)
            for each in self.plans:
                child = Child(
                    each,
                    self.log_dir / f"{each.name}.log",
                    policy=self._policy,
                    inherited_fds=(self._lock.fd,),  # the lock lives as long as any of them
                    on_change=self._changed,
                )
                self.children.append(child)
                self._tasks[asyncio.create_task(child.run(), name=each.name)] = child
        except BaseException:
            self._lock.release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        finally:
            self.kill()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._lock is not None:
                self._lock.release()

    async def ready(self, timeout_s: float) -> float:
        """Wait until every process serves and the router has reached every stage that was started here.

        Returns:
            Seconds that it took.

        Raises:
            NotReady: It took too long.
            ProcessFailed: A process was given up.
        """
        start = time.monotonic()
        failed = asyncio.create_task(self.failed())
        serving = asyncio.create_task(self._all_serve())
        try:
            await asyncio.wait([failed, serving], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            if not serving.done():
                raise NotReady(f"not ready after {timeout_s:g} s: {self._missing()}")
            serving.result()
        finally:
            failed.cancel()
            serving.cancel()
            await asyncio.gather(failed, serving, return_exceptions=True)
        return time.monotonic() - start

    async def failed(self) -> None:
        """Wait until a process is given up. Raises its ProcessFailed; returns only when all were stopped."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    def kill(self) -> None:
        """Kill all processes at once, from any thread. The block must still be left."""
        for child in self.children:
            child.kill()

    def _changed(self, child: Child) -> None:
        if all(each.state is State.SERVING for each in self.children):
            self._serving.set()
        else:
            self._serving.clear()
        if self.on_change is not None:
            self.on_change(child)

    async def _stop(self) -> None:
        routers = [child for child in self.children if not child.plan.stage]
        stages = [child for child in self.children if child.plan.stage]
        for group in (routers, stages):
            await asyncio.gather(*(child.stop() for child in group))

    async def _all_serve(self) -> None:
        await self._serving.wait()
        router = next((child for child in self.children if child.plan.name == ROUTER), None)
        if router is None:
            return
        stages = {child.plan.stage for child in self.children if child.plan.stage}
        async with health_channel(router.plan.address) as ask:
            for name in sorted(stages):
                # A stage that no pipeline uses is unknown to the router.
                while await ask(f"stage/{name}") not in {Health.SERVING, Health.UNKNOWN_NAME}:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)

    def _missing(self) -> str:
        waiting = [
            f"{child.plan.name} is {child.state.value}" for child in self.children if child.state is not State.SERVING
        ]
        return ", ".join(waiting) or "the router has not reached every stage"


async def _lock(run_dir: Path) -> FileLock:
    """The lock of a run directory, with our id in it. Waits for the children of a supervisor that was killed."""
    path = run_dir / "up.pid"
    try:
        await asyncio.to_thread(run_dir.mkdir, mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir {run_dir} cannot be made: {error}") from error
    deadline = time.monotonic() + _ORPHANS_S
    while True:
        try:
            lock = FileLock(path)
        except BlockingIOError:
            holder = _holder(path)
            if holder is not None and _alive(holder):
                raise AlreadyRunning(
                    f"omnistage is up in {run_dir} already (process {holder}); stop it, or set another run_dir"
                ) from None
            if time.monotonic() > deadline:
                raise AlreadyRunning(
                    f"processes of an earlier run in {run_dir} still run, although process {holder}, which started them, "
                    "is gone; end them first"
                ) from None
            await asyncio.sleep(_POLL_S)
        except OSError as error:
            raise ConfigError(f"{path} cannot be locked: {error}") from error
        else:
            os.truncate(lock.fd, 0)
            os.write(lock.fd, f"{os.getpid()}\n".encode())
            return lock


def _holder(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
