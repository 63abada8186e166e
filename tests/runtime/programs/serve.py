"""A server process for tests: `serve.py ADDRESS...`. Its first line on stdout is the JSON list of its addresses.

Service test.Test, unary, bytes: Sleep and Hold (without the interpreter lock given up) wait so many seconds, Peer tells the caller's
address. Stopped by a signal it drains like every process of an installation.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys

import grpc
import grpc.aio

from stage_runtime import logs
from stage_runtime.config import ConfigError, LogSettings, ServerSettings
from stage_runtime.health import HealthServicer
from stage_runtime.server import open_server
from stage_runtime.shutdown import Shutdown


async def sleep(request, context):
    await asyncio.sleep(float(request))
    return b"done"


async def hold(request, context):
    ctypes.PyDLL(None).sleep(int(request))  # PyDLL keeps the lock
    return b"done"


async def peer(request, context):
    return context.peer().encode()


async def size(request, context):
    return b"x" * int(request) if len(request) < 20 else str(len(request)).encode()


def register(server):
    methods = {"Sleep": sleep, "Hold": hold, "Peer": peer, "Size": size}
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    return []


async def main(listen):
    health = HealthServicer()
    settings = ServerSettings(max_message_bytes=8 * 2**20)
    with Shutdown() as shutdown:
        server = await open_server(listen, settings, register, health)
        health.set("", serving=True)
        sys.stdout.write(json.dumps({"pid": os.getpid(), "addresses": server.addresses}) + "\n")
        sys.stdout.flush()
        await shutdown.wait()
        await server.stop(5)


if __name__ == "__main__":
    logs.configure(LogSettings(level="warning"), process="test")
    try:
        asyncio.run(main(sys.argv[1:]))
    except ConfigError as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        sys.exit(2)
