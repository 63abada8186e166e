"""Cost of one lane step beside a bare gRPC relay of the same bytes, in one run.

Ours: 32 requests in lock step; each step carries 32 rows of 3072 bf16 to a stage process and back through the real lane, scheduler and
engine thread; the engine only echoes. Baseline: the same bytes as one message through a bare grpc.aio bidirectional stream to an
echo process behind a bare relay process. Rounds of both alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import yaml

from benchmarks.common import report, summary
from stage_runtime.config import LaneSettings
from stage_runtime.grpc_options import channel_options
from stage_runtime.lane_client import CallRequest, Lane, StageCall
from stage_runtime.tensors import DType, Rows
from stage_runtime.testing import ToyParams

WIDTH = 3072
ROWS = 32
ROUNDS = 6
STEPS = 150
WARM_UP = 30
MESSAGE_BYTES = 64 * 2**20
METHOD = "/bench.Echo/Run"


def echo_handler() -> grpc.GenericRpcHandler:
    """A bidirectional stream that sends back what it gets."""

    async def run(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    return grpc.method_handlers_generic_handler("bench.Echo", {"Run": grpc.stream_stream_rpc_method_handler(run)})


def relay_handler(target: str) -> grpc.GenericRpcHandler:
    """A bidirectional stream that passes messages on to `target` and back."""

    async def run(_: Any, context: Any) -> None:
        async with grpc.aio.insecure_channel(target, options=channel_options(MESSAGE_BYTES)) as channel:
            onward: Any = channel.stream_stream(METHOD)()
            while (message := await context.read()) is not grpc.aio.EOF:
                await onward.write(message)
                await context.write(await onward.read())

    return grpc.method_handlers_generic_handler("bench.Echo", {"Run": grpc.stream_stream_rpc_method_handler(run)})


async def serve(address: str, target: str) -> None:
    """Serve an echo, or a relay to `target`, until killed."""
    server = grpc.aio.server(options=channel_options(MESSAGE_BYTES))
    server.add_generic_rpc_handlers((relay_handler(target) if target else echo_handler(),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


@contextlib.asynccontextmanager
async def processes(*commands: list[str]) -> AsyncIterator[None]:
    """Python processes for the time of the block."""
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        for command in commands
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        await asyncio.gather(*(process.wait() for process in started))


async def open_lane(channel: grpc.aio.Channel, address: str) -> Lane:
    """A lane, as soon as the stage has loaded."""
    lane = Lane(channel, LaneSettings(), stage="toy", address=address, router="bench")
    for _ in range(200):
        try:
            await lane.connect()
        except (grpc.aio.AioRpcError, TimeoutError):  # not up yet; the last try tells
            await asyncio.sleep(0.1)
        else:
            return lane
    await lane.connect()
    return lane


async def lane_round(calls: list[StageCall], steps: int) -> list[float]:
    """Seconds of each step of all rows."""
    rows = {"in": Rows(DType.BF16, (WIDTH,), os.urandom(WIDTH * 2).replace(b"\x7f", b"\x00").replace(b"\xff", b"\x00"))}
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        for call in calls:
            call.send(rows)
        for call in calls:
            await call.receive()
        times.append(time.perf_counter() - started)
    return times


async def relay_round(stream: Any, steps: int) -> list[float]:
    """Seconds of each echo of as many bytes."""
    message = os.urandom(ROWS * WIDTH * 2)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        await stream.write(message)
        await stream.read()
        times.append(time.perf_counter() - started)
    return times


async def messages_per_step(lane: Lane, calls: list[StageCall], steps: int) -> float:
    """Messages from router to stage for each step."""
    before = lane.messages_sent
    await lane_round(calls, steps)
    return (lane.messages_sent - before) / steps


async def measure(folder: Path) -> None:
    """Run both and report."""
    stage, relay, echo = (f"unix:{folder / name}.sock" for name in ("stage", "relay", "echo"))
    engine = {"width": WIDTH, "dtype": "BF16", "capacity": 2 * ROWS}
    settings = {
        "stages": {"toy": {"kind": "toy", "addresses": [stage], "engine": engine}},
        "pipelines": {"speech": {"thinker": "toy", "acoustic": "toy", "codec": "toy"}},
    }
    config = folder / "omnistage.yaml"
    await asyncio.to_thread(config.write_text, yaml.safe_dump(settings))
    me = ["-m", "benchmarks.lane"]
    toy = ["-m", "stage_runtime.testing", "--config", str(config), "--stage", "toy"]
    async with (
        processes(toy, [*me, "--serve", relay, "--target", echo], [*me, "--serve", echo]),
        grpc.aio.insecure_channel(stage, options=channel_options(MESSAGE_BYTES)) as lane_channel,
        grpc.aio.insecure_channel(relay, options=channel_options(MESSAGE_BYTES)) as relay_channel,
    ):
        lane = await open_lane(lane_channel, stage)
        carrier = asyncio.create_task(lane.run())
        params = ToyParams(outputs=10**9, lock_step=True).to_struct()
        calls = [lane.call(CallRequest(f"r{number}", params)) for number in range(ROWS)]
        await asyncio.gather(*(call.wait_accepted() for call in calls))
        await relay_channel.channel_ready()
        stream: Any = relay_channel.stream_stream(METHOD)()
        ours: list[float] = []
        plain: list[float] = []
        await lane_round(calls, WARM_UP)
        await relay_round(stream, WARM_UP)
        for _ in range(ROUNDS):
            ours += await lane_round(calls, STEPS)
            plain += await relay_round(stream, STEPS)
        sent = await messages_per_step(lane, calls, STEPS)
        sent_few = await messages_per_step(lane, calls[:2], STEPS)
        stream.cancel()
        carrier.cancel()
        await asyncio.gather(carrier, return_exceptions=True)
    figures = summary("lane", ours) | summary("relay", plain)
    figures |= {
        "payload_bytes": ROWS * WIDTH * 2,
        "messages_per_step_32_rows": sent,
        "messages_per_step_2_rows": sent_few,
    }
    p50 = sorted(ours)[len(ours) // 2] / sorted(plain)[len(plain) // 2]
    p99 = sorted(ours)[len(ours) * 99 // 100] / sorted(plain)[len(plain) * 99 // 100]
    report("lane", figures, {"p50_vs_relay": p50, "p99_vs_relay": p99})


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.target))
        return
    with tempfile.TemporaryDirectory(prefix="omnistage-") as folder:
        asyncio.run(measure(Path(folder)))


if __name__ == "__main__":
    main()
