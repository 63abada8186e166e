"""`omnistage health`: a probe with the exit codes of grpc_health_probe."""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Any

import click
import grpc
import grpc.aio

from omnistage import calls
from omnistage.cli.common import one_line, timeout_option
from omnistage.connection import ServerUnreachable, check_address, error_of, open_options

_SETTLED = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


class Exit(IntEnum):
    """Exit codes."""

    SERVING = 0
    USAGE = 1  # given by `main`
    NO_CONNECTION = 2
    CALL_FAILED = 3
    NOT_SERVING = 4


@click.command()
@click.argument("address")
@click.argument("service", default="")
@timeout_option(5.0)
def health(address: str, service: str, timeout_s: float) -> int:
    """Ask the process at ADDRESS for the health of SERVICE (default: of itself) by grpc.health.v1.

    Exit code 0: SERVING, 1: wrong usage, 2: no connection, 3: the call failed or the service is unknown, 4: not serving.
    """
    try:
        check_address(address)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    code, text = asyncio.run(_probe(address, service, timeout_s))
    click.echo(one_line(text), err=code is not Exit.SERVING)
    return code


async def _probe(address: str, service: str, timeout_s: float) -> tuple[Exit, str]:
    """Exit code and what to print."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    # No repeated attempts: a probe tells what is.
    options = [*open_options(address), ("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        try:
            async with asyncio.timeout_at(deadline):
                connected = await _connect(channel)
        except TimeoutError:
            return Exit.NO_CONNECTION, f"error: no connection to {address} within {timeout_s:g} s"
        call = calls.health(service)
        check: Any = channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        try:
            state = call.convert(await check(call.request, timeout=max(0.0, deadline - loop.time())))
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure, address)
            lost = isinstance(error, ServerUnreachable) and not connected
            return Exit.NO_CONNECTION if lost else Exit.CALL_FAILED, f"error: {error.message}"
    return Exit.SERVING if state == "SERVING" else Exit.NOT_SERVING, state


async def _connect(channel: grpc.aio.Channel) -> bool:
    """Whether a connection came about; after a failed attempt the next call tells why."""
    while (state := channel.get_state(try_to_connect=True)) not in _SETTLED:
        await channel.wait_for_state_change(state)
    return state is grpc.ChannelConnectivity.READY
