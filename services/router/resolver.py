"""Addresses of a stage: static ones as they are, dns:///name:port as one address for each record, looked up again and again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Sequence

from stage_runtime.logs import get_logger

_log = get_logger(__name__)

DNS = "dns:///"


async def resolve(addresses: Sequence[str], *, known: Collection[str] = ()) -> list[str]:
    """The addresses to dial, each once.

    A name that cannot be resolved keeps the addresses that are `known`: a name server that is down must not take the stage away.
    """
    found: list[str] = []
    failed = False
    for address in addresses:
        if not address.startswith(DNS):
            found.append(address)
            continue
        try:
            found += await _look_up(address.removeprefix(DNS))
        except OSError as error:
            failed = True
            _log.warning("name_not_resolved", name=address, error=str(error))
    if failed:
        found += known
    return list(dict.fromkeys(found))


async def _look_up(name: str) -> list[str]:
    host, _, port = name.rpartition(":")
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(f"[{info[4][0]}]:{port}" if info[0] == socket.AF_INET6 else f"{info[4][0]}:{port}" for info in infos)
