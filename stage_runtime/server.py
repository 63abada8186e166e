"""A gRPC server as every process of an installation has one: options, errors, health, reflection, guarded addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from stage_runtime import addresses, logs
from stage_runtime.addresses import Address, AddressInUse, SocketGuard, TcpAddress, UnixAddress
from stage_runtime.config import ConfigError, ServerSettings
from stage_runtime.grpc_options import server_options
from stage_runtime.health import SERVICE_NAME as HEALTH_NAME
from stage_runtime.health import HealthServicer
from stage_runtime.interceptors import ErrorInterceptor
from stage_runtime.reflection import add_reflection

__all__ = ["AddressInUse", "RunningServer", "open_server"]

_log = logs.get_logger(__name__)

Register = Callable[[grpc.aio.Server], Sequence[str]]


class RunningServer:
    """A server that listens. Made by `open_server`."""

    def __init__(
        self, server: grpc.aio.Server, listening: Sequence[str], guards: Sequence[SocketGuard], health: HealthServicer
    ) -> None:
        self._server = server
        self._addresses = tuple(listening)
        self._guards = tuple(guards)
        self._health = health

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, in the order that was asked for, with the ports that were really taken."""
        return self._addresses

    async def stop(self, grace_s: float) -> None:
        """Take no more connections and calls, give those in flight `grace_s`, cancel the rest; then free the addresses.

        Health says NOT_SERVING from the start, and its Watch streams hold nothing up. May be called again.
        """
        self._health.close()
        await self._server.stop(grace_s)
        _release(self._guards)

    async def wait(self) -> None:
        """Wait until the server was stopped."""
        await self._server.wait_for_termination()


async def open_server(
    listen: Sequence[str], settings: ServerSettings, register: Register, health: HealthServicer
) -> RunningServer:
    """Start a server on every address of `listen`.

    Args:
        listen: "host:port" (port 0: a free one) or "unix:/path"; a name stands for all addresses it resolves to.
        settings: Limits, reflection, permissions of sockets.
        register: Adds servicers to the server and returns the full names of their services.
        health: Answers grpc.health.v1; the services become known to it, NOT_SERVING.

    Raises:
        AddressInUse: Another process listens on one of the addresses.
        ConfigError: An address is faulty, or cannot be used by this process. In both cases nothing stays open.
    """
    if not listen:
        raise ConfigError("no address to listen on is given")
    wanted = [addresses.parse(text) for text in listen]
    for address in wanted:
        if isinstance(address, TcpAddress):
            await asyncio.to_thread(addresses.resolve, address)  # before anything is bound
    guards: dict[UnixAddress, SocketGuard] = {}
    server = grpc.aio.server(options=server_options(settings), interceptors=[ErrorInterceptor()])
    try:
        names = _add_services(server, settings, register, health)
        listening = [str(await _bind(server, address, guards, settings.socket_mode)) for address in wanted]
        await server.start()
    except BaseException:
        await server.start()  # only a server that was started gives its ports back
        await server.stop(None)
        _release(guards.values())
        raise
    _log.info("listening", addresses=listening, services=names)
    return RunningServer(server, listening, tuple(guards.values()), health)


def _add_services(
    server: grpc.aio.Server, settings: ServerSettings, register: Register, servicer: HealthServicer
) -> list[str]:
    names = list(register(server))
    servicer.add(*names)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if settings.reflection:
        add_reflection(server, [*names, HEALTH_NAME])
    return names


async def _bind(
    server: grpc.aio.Server, address: Address, guards: dict[UnixAddress, SocketGuard], mode: int
) -> Address:
    """Bind an address; where it is bound in the end."""
    if isinstance(address, TcpAddress):
        return await _bind_tcp(server, address)
    guards[address] = SocketGuard(address)
    with addresses.socket_mode(mode):
        try:
            server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise ConfigError(f"address {address} cannot be listened on: {error}") from error
    guards[address].bound()
    return address


async def _bind_tcp(server: grpc.aio.Server, address: TcpAddress) -> TcpAddress:
    """Bind every IP address that the host stands for, at the same port."""
    port = address.port
    for ip in await asyncio.to_thread(addresses.resolve, address):
        try:
            port = server.add_insecure_port(str(TcpAddress(ip, port)))
        except RuntimeError as error:
            # It was free a moment ago.
            raise addresses.in_use(TcpAddress(address.host, port)) from error
    return TcpAddress(address.host, port)


def _release(guards: Iterable[SocketGuard]) -> None:
    for guard in guards:
        guard.release()
