"""`omnistage up`: run the router and all stages of an installation on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stage_runtime import config
from stage_runtime.child import Child, ProcessFailed, State
from stage_runtime.config import ConfigError, Installation
from stage_runtime.process_plan import ProcessPlan
from stage_runtime.shutdown import Shutdown
from stage_runtime.supervise import NotReady, Supervisor

EXIT_FAILED = 1
EXIT_CONFIG = 2

_STYLES = {
    State.STARTING: "yellow",
    State.LOADING: "yellow",
    State.SERVING: "green",
    State.NOT_SERVING: "yellow",
    State.SILENT: "red",
    State.RESTARTING: "red",
    State.STOPPING: "yellow",
    State.STOPPED: "dim",
    State.FAILED: "bold red",
}


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings file. [default: OMNISTAGE_CONFIG, then ./omnistage.yaml]",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@click.option("--only", multiple=True, metavar="NAME", help='Start only this stage, or "router"; may be repeated.')
@click.option(
    "--ready-timeout",
    "ready_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Give up if not everything serves within this many seconds.",
)
def up(config_path: Path | None, overrides: tuple[str, ...], only: tuple[str, ...], ready_timeout_s: float) -> None:
    """Run the router and all stages on this machine until Ctrl-C.

    Requests in flight are finished before the processes stop; a second Ctrl-C kills everything at once. A process that crashes is
    started again. What the processes write goes to logs/NAME.log in the run directory.

    Exit code 0 after an orderly stop, 1 if a process cannot be kept running, 2 if the settings are faulty.
    """
    try:
        file = config.find_file(config_path)
        installation = config.load(file, overrides=overrides)
        code = asyncio.run(_run(installation, file, overrides, only, ready_timeout_s))
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        code = EXIT_CONFIG
    sys.exit(code)


async def _run(
    installation: Installation, file: Path, overrides: Sequence[str], only: Sequence[str], ready_timeout_s: float
) -> int:
    supervisor = Supervisor(installation, file, overrides=overrides, only=only)
    console = Console()
    display: _Display = _Table(console, supervisor.plans) if console.is_terminal else _Lines(supervisor.plans)
    supervisor.on_change = display.changed

    def kill() -> None:
        supervisor.kill()
        if console.is_terminal:
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # show the cursor again, which the table hides

    with Shutdown(at_second=kill) as shutdown, display:
        try:
            async with supervisor:
                took_s = await _unless(shutdown, supervisor.ready(ready_timeout_s))
                if took_s is not None:
                    display.say(_ready_text(supervisor, took_s))
                    await _unless(shutdown, supervisor.failed())
        except (ProcessFailed, NotReady) as error:
            failure = error
        else:
            return 0
    _report(failure)
    return EXIT_FAILED


async def _unless(shutdown: Shutdown, work: Coroutine[Any, Any, float | None]) -> float | None:
    """The result of `work`, or None if the process is told to stop before."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(shutdown.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _ready_text(supervisor: Supervisor, took_s: float) -> str:
    router = [address for plan in supervisor.plans if not plan.stage for address in plan.listen]
    where = f" at {', '.join(router)}" if router else ""
    return f"ready{where} after {took_s:.1f} s; logs in {supervisor.log_dir}; Ctrl-C stops"


def _report(error: ProcessFailed | NotReady) -> None:
    if isinstance(error, ProcessFailed) and error.log_tail:
        click.echo(f"last lines of {error.name}:", err=True)
        for line in error.log_tail:
            click.echo(f"  {line}", err=True)
    click.echo(f"error: {error}", err=True)


class _Display(Protocol):
    """Shows one line for each process."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def changed(self, child: Child) -> None: ...

    def say(self, text: str) -> None: ...


class _Lines:
    """For logs and pipes: a line for each change."""

    def __init__(self, plans: Sequence[ProcessPlan]) -> None:
        self._width = max(len(plan.name) for plan in plans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def changed(self, child: Child) -> None:
        click.echo(f"{child.plan.name:<{self._width}}  {child.state.value:<13}  {_detail(child)}".rstrip())

    def say(self, text: str) -> None:
        click.echo(text)


class _Table:
    """For terminals: a table that changes in place."""

    def __init__(self, console: Console, plans: Sequence[ProcessPlan]) -> None:
        self._console = console
        self._children: dict[str, Child | None] = {plan.name: None for plan in plans}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def changed(self, child: Child) -> None:
        self._children[child.plan.name] = child

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, child in self._children.items():
            if child is None:
                table.add_row(name, "")
            else:
                table.add_row(name, Text(child.state.value, style=_STYLES[child.state]), Text(_detail(child)))
        return table


def _detail(child: Child) -> str:
    parts = [child.detail]
    if child.state in {State.STARTING, State.SERVING}:
        parts = [child.plan.address, f"process {child.pid}"]
        if child.starts > 1:
            parts.append(f"start {child.starts}")
    return ", ".join(part for part in parts if part)
