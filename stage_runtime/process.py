"""A stage process: settings, server, engine thread, health, drain. `run_stage` is all that a stage's __main__ calls."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc.aio

from omnistage.stage.v1 import stage_pb2, stage_pb2_grpc
from stage_runtime import config, logs
from stage_runtime.config import ConfigError, Installation, StageSettings
from stage_runtime.engine import Engine, StageDescription
from stage_runtime.engine_thread import EngineThread
from stage_runtime.errors import OmnistageError
from stage_runtime.health import HealthServicer
from stage_runtime.lane_server import StageServicer
from stage_runtime.server import RunningServer, open_server
from stage_runtime.shutdown import Shutdown, watch_parent

_log = logs.get_logger(__name__)

STAGE_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name

EXIT_FAILED = 1
EXIT_CONFIG = 2
# After the grace period: for error messages to reach their clients.
FAREWELL_S = 1.0

CreateEngine = Callable[[StageSettings], Engine[Any]]


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    installation: Installation
    settings: StageSettings
    listen: tuple[str, ...]
    create: CreateEngine


def run_stage(kind: str | None, create: CreateEngine, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a stage process until it is told to stop; never returns.

    Args:
        kind: Kind that the settings must name for this stage; None if `create` takes several.
        create: Makes the engine; called on the engine thread, may raise ConfigError.
        argv: Command line; None for the process's own.

    Exit code 0 after an orderly stop, 1 if loading failed, 2 if the settings or the address are faulty.
    """
    options = _parse(argv)
    try:
        installation = config.load(options.config, overrides=options.set)
        settings = installation.stage(options.stage)
        if kind is not None and settings.kind != kind:
            raise ConfigError(f"stages.{options.stage}.kind is {settings.kind!r}; this program serves {kind!r}")  # noqa: TRY301
        if options.print_config:
            sys.stdout.write(config.dump(installation))
            raise SystemExit(0)
        listen = tuple(options.listen) or settings.local_addresses
        logs.configure(installation.log, process=f"stage/{options.stage}")
        if options.parent_pid is not None:
            watch_parent(options.parent_pid)
        process = _Process(options.stage, installation, settings, listen, create)
        code = asyncio.run(_serve(process))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        code = EXIT_CONFIG
    raise SystemExit(code)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve one replica of one stage.")
    parser.add_argument("--config", help="settings file (default: OMNISTAGE_CONFIG, then ./omnistage.yaml)")
    parser.add_argument("--stage", required=True, help="name of the stage in the settings")
    parser.add_argument("--listen", action="append", default=[], help="address to serve on (default: the stage's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--print-config", action="store_true", help="print the settings in force and exit")
    parser.add_argument("--parent-pid", type=int, help="exit when this process, the supervisor, is gone")
    return parser.parse_args(argv)


async def _serve(process: _Process) -> int:
    health = HealthServicer(["", f"stage/{process.name}", STAGE_SERVICE])
    settings = process.settings
    servicer = StageServicer(process.name, max_queued=settings.max_queued, drain_grace_s=settings.drain_grace_s)
    engine = EngineThread(
        lambda: _create(process), stage=process.name, max_queued=settings.max_queued, deliver=servicer.deliver
    )
    servicer.attach(engine)

    def register(server: grpc.aio.Server) -> list[str]:
        stage_pb2_grpc.add_StageServiceServicer_to_server(servicer, server)
        return [STAGE_SERVICE]

    with Shutdown() as shutdown:
        server = await open_server(process.listen, settings, register, health)
        try:
            engine.start()
            description = await _load(engine, shutdown)
            if description is not None:
                servicer.loaded(description)
                _say_ready(process, health, server, description)
                await shutdown.wait()
                _log.info("draining", stage=process.name, grace_s=settings.drain_grace_s)
                health.shutdown()
                await servicer.drain(settings.drain_grace_s)
                await _farewell(servicer)
        except OmnistageError as error:
            _log.error("load_failed", stage=process.name, reason=error.reason, error=str(error))
            sys.stderr.write(f"error: {error}\n")
            return EXIT_FAILED
        finally:
            health.close()
            await server.stop(0)
    engine.stop()
    _log.info("stopped", stage=process.name)
    return 0


def _create(process: _Process) -> Engine[Any]:
    if "torch" in sys.modules:  # set for this thread before the engine's first use of it
        import torch  # noqa: PLC0415  # stages without torch must not pay for it

        torch.set_num_threads(process.settings.threads)
    return process.create(process.settings)


async def _load(engine: EngineThread, shutdown: Shutdown) -> StageDescription | None:
    """Wait for the engine; None if the process is told to stop before. Raises what loading raised."""
    loading: asyncio.Future[StageDescription] = asyncio.wrap_future(engine.loaded)
    stopping: asyncio.Future[None] = asyncio.ensure_future(shutdown.wait())
    both: list[asyncio.Future[Any]] = [loading, stopping]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return loading.result() if loading.done() else None
    finally:
        loading.cancel()
        stopping.cancel()


def _say_ready(process: _Process, health: HealthServicer, server: RunningServer, description: StageDescription) -> None:
    for name in ("", f"stage/{process.name}", STAGE_SERVICE):
        health.set(name, serving=True)
    _log.info(
        "serving",
        stage=process.name,
        kind=description.kind,
        model=description.model,
        addresses=list(server.addresses),
    )


async def _farewell(servicer: StageServicer) -> None:
    try:
        async with asyncio.timeout(FAREWELL_S):
            await servicer.fail_rest()
    except TimeoutError:
        _log.warning("requests_left_behind")
