"""Run the router: `python -m services.router --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import grpc.aio

from omnistage.v1 import pipeline_pb2, pipeline_pb2_grpc, speech_pb2_grpc
from services.router.servicers.pipeline import PipelineServicer
from services.router.servicers.speech import SpeechServicer
from services.router.system import SPEECH_SERVICE, System
from stage_runtime import config, logs
from stage_runtime.config import ConfigError, Installation
from stage_runtime.health import HealthServicer
from stage_runtime.server import open_server
from stage_runtime.shutdown import Shutdown, watch_parent

_log = logs.get_logger(__name__)

PIPELINE_SERVICE = pipeline_pb2.DESCRIPTOR.services_by_name["PipelineService"].full_name
EXIT_CONFIG = 2
# After the grace period: for error messages to reach their clients.
FAREWELL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0 after an orderly stop, 2 if the settings or the address are faulty."""
    options = _parse(argv)
    try:
        installation = config.load(options.config, overrides=options.set)
        if options.print_config:
            sys.stdout.write(config.dump(installation))
            return 0
        logs.configure(installation.log, process="router")
        if options.parent_pid is not None:
            watch_parent(options.parent_pid)
        asyncio.run(serve(installation))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_CONFIG
    return 0


async def serve(installation: Installation) -> None:
    """Serve until told to stop, then drain. Waits for no stage."""
    settings = installation.router
    health = HealthServicer(["", PIPELINE_SERVICE] if settings.admin else [""])
    system = System(installation, health)

    def register(server: grpc.aio.Server) -> list[str]:
        speech_pb2_grpc.add_SpeechServiceServicer_to_server(SpeechServicer(system), server)
        if not settings.admin:
            return [SPEECH_SERVICE]
        pipeline_pb2_grpc.add_PipelineServiceServicer_to_server(PipelineServicer(system), server)
        return [SPEECH_SERVICE, PIPELINE_SERVICE]

    with Shutdown() as shutdown:
        server = await open_server(settings.listen, settings, register, health)
        keeper = asyncio.create_task(system.run(), name="pools")
        try:
            health.set("", serving=True)
            if settings.admin:
                health.set(PIPELINE_SERVICE, serving=True)
            _log.info("serving", addresses=list(server.addresses), pipelines=list(system.speech))
            await _until_told(shutdown, keeper)
            _log.info("draining", grace_s=settings.drain_grace_s, in_flight=system.requests.in_flight_count)
            health.shutdown()
            await system.requests.drain(settings.drain_grace_s)
        finally:
            health.close()
            await server.stop(FAREWELL_S)
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
    _log.info("stopped")


async def _until_told(shutdown: Shutdown, keeper: asyncio.Task[None]) -> None:
    """Wait for the signal; a bug that ends the pools ends the router loudly instead of leaving it deaf."""
    told = asyncio.create_task(shutdown.wait())
    await asyncio.wait([told, keeper], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if keeper.done():
        await keeper


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve the router.")
    parser.add_argument("--config", help="settings file (default: OMNISTAGE_CONFIG, then ./omnistage.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--print-config", action="store_true", help="print the settings in force and exit")
    parser.add_argument("--parent-pid", type=int, help="exit when this process, the supervisor, is gone")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
