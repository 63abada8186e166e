"""A process that waits for its end: `wait_for_stop.py STATE [--parent-pid PID]`. It writes "ready", and "stopping" when told to.

STATE says what it does meanwhile:
    idle      the event loop waits; stops when told
    stubborn  is told and goes on
    blocked   the event loop is blocked; never stops by itself
    busy      two other threads compute, and the loop waits; stops when told, after ten seconds
    loading   the main thread is deep in a library before there is an event loop
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import threading
import time

from stage_runtime.shutdown import Shutdown, watch_parent


def say(word):
    with contextlib.suppress(BrokenPipeError):  # the reader was killed
        os.write(1, f"{word}\n".encode())


def compute():
    while True:
        sum(range(1000))


async def main(state):
    with Shutdown() as shutdown:
        say("ready")
        if state == "blocked":
            time.sleep(60)
        await shutdown.wait()
        say(f"stopping {shutdown.received.name}")
        if state != "idle":
            await asyncio.sleep(10)


parser = argparse.ArgumentParser()
parser.add_argument("state")
parser.add_argument("--parent-pid", type=int)
options = parser.parse_args()
if options.parent_pid is not None:
    watch_parent(options.parent_pid)
if options.state == "loading":
    say("ready")
    ctypes.CDLL(None).sleep(60)
if options.state == "busy":
    for _ in range(2):
        threading.Thread(target=compute, daemon=True).start()
asyncio.run(main(options.state))
