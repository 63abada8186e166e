"""A stage process without a model, for tests of the supervisor; run as a module. Its `engine` settings say how it behaves.

exit_code  ends with this code after `after_s` seconds (default 0)
load_s     is NOT_SERVING so long, with a free event loop
block_s    the main thread is deep in a library so long, before it listens
busy       two threads compute
stop_s     needs so long to stop
deaf       ignores SIGTERM
helper     starts a process of its own, and writes its id
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import subprocess
import sys
import threading

from stage_runtime import config, logs
from stage_runtime.health import HealthServicer
from stage_runtime.server import open_server
from stage_runtime.shutdown import Shutdown, watch_parent


def compute():
    while True:
        sum(range(1000))


async def serve(listen, settings, behave):
    health = HealthServicer()
    with Shutdown() as shutdown:
        server = await open_server([listen], settings, lambda server: [], health)
        stop = asyncio.create_task(shutdown.wait())
        if "exit_code" in behave:
            await asyncio.sleep(behave.get("after_s", 0))
            sys.stderr.write(f"ending with {behave['exit_code']}\n")
            await server.stop(0)  # gRPC crashes when the interpreter ends with a running server
            return behave["exit_code"]
        await asyncio.wait([stop], timeout=behave.get("load_s", 0))
        health.set("", serving=True)
        if behave.get("deaf"):
            await asyncio.sleep(60)
        await stop
        await asyncio.sleep(behave.get("stop_s", 0))
        await server.stop(0)
        return 0


parser = argparse.ArgumentParser()
for name in ("--config", "--stage", "--listen"):
    parser.add_argument(name, required=True)
parser.add_argument("--set", action="append", default=[])
parser.add_argument("--parent-pid", type=int, required=True)
options = parser.parse_args()
watch_parent(options.parent_pid)
installation = config.load(options.config, overrides=options.set)
logs.configure(installation.log, process=options.stage)
stage = installation.stage(options.stage)
sys.stderr.write(f"start of {options.stage} with {options.set}\n")
if stage.engine.get("block_s"):
    ctypes.CDLL(None).sleep(int(stage.engine["block_s"]))
if stage.engine.get("busy"):
    for _ in range(2):
        threading.Thread(target=compute, daemon=True).start()
if stage.engine.get("helper"):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sys.stderr.write(f"helper {helper.pid}\n")
sys.exit(asyncio.run(serve(options.listen, stage, stage.engine)))
