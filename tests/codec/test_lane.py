"""The codec stage as a router meets it: its own process, a real lane, streams that share it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import torch
import yaml

from omnistage.stage.v1 import stage_pb2
from services.router.chunks import ChunkPlan, plan_chunk
from stage_runtime.config import LaneSettings
from stage_runtime.errors import InvalidRequest, StageProtocolError
from stage_runtime.lane_client import CallRequest, Lane, StageCall
from stage_runtime.tensors import rows_from_numpy

ROOT = Path(__file__).resolve().parents[2]
PLAN = ChunkPlan(5, 25, 25)


@contextlib.asynccontextmanager
async def codec_process(folder: Path, model: Path) -> AsyncIterator[str]:
    """The codec stage as a process of its own; gives its address. It must stop in order when told to."""
    address = f"unix:{folder}/codec.sock"
    stages = {
        name: {"kind": f"voxtral.{name}", "model": str(model), "addresses": [address]}
        for name in ("thinker", "acoustic", "codec")
    }
    file = folder / "omnistage.yaml"
    file.write_text(yaml.safe_dump({"stages": stages, "pipelines": {"speech": {}}}))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.codec", "--config", str(file), "--stage", "codec", cwd=ROOT
    )
    try:
        yield address
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def open_lane(address: str) -> AsyncIterator[tuple[Lane, stage_pb2.DescribeStageResponse]]:
    """A lane to a stage that may still be starting, and what the stage tells."""
    async with grpc.aio.insecure_channel(address) as channel:
        async with asyncio.timeout(60):
            await channel.channel_ready()
        lane = Lane(channel, LaneSettings(), stage="codec", address=address, router="test")
        description = await connect(lane)
        carrier = asyncio.create_task(lane.run())
        try:
            yield lane, description
        finally:
            carrier.cancel()
            await asyncio.gather(carrier, return_exceptions=True)


async def connect(lane: Lane) -> stage_pb2.DescribeStageResponse:
    """Connect once the stage has loaded its weights."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await lane.connect()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05)


def request(name: str, plan: ChunkPlan = PLAN) -> CallRequest:
    """A codec request with a chunk plan."""
    return CallRequest(
        name,
        stage_pb2.SpeechCodecParams(
            first_chunk_frames=plan.first_chunk_frames,
            chunk_frames=plan.chunk_frames,
            context_frames=plan.context_frames,
        ),
    )


def send(call: StageCall, codes: torch.Tensor, context: int) -> None:
    """Send a window."""
    rows = rows_from_numpy(codes.to(torch.int32).numpy(), row_counts=[len(codes)])
    call.send({"codes": rows}, context_count=context)


async def stream(lane: Lane, name: str, codes: torch.Tensor) -> bytes:
    """Samples of codes, sent in chunks as a router does."""
    sent, pcm = 0, b""
    async with lane.call(request(name)) as call:
        await call.wait_accepted()
        while (chunk := plan_chunk(len(codes), sent, finished=True, plan=PLAN)) is not None:
            sent += chunk.new
            send(call, codes[sent - chunk.new - chunk.ctx : sent], chunk.ctx)
            output = await call.receive()
            assert output is not None
            pcm += bytes(output.tensors["pcm"].data)
        call.end()
        assert await call.receive() is None
    return pcm


async def test_streams_share_a_process_and_faults_stay_alone(
    model: Path, socket_dir: Path, decoder, random_codes
) -> None:
    """Four streams at once and three faulty requests: each stream's bytes are those it gets alone, which are the whole decode."""
    codes = [random_codes(frames, seed=frames) for frames in (7, 31, 60, 62)]
    bad = random_codes(5)
    bad[2, 4] = 500
    async with codec_process(socket_dir, model) as address, open_lane(address) as (lane, description):
        assert description.kind == "voxtral.codec"
        assert description.speech_codec.left_reach_frames == 21

        alone = [await stream(lane, f"alone-{at}", own) for at, own in enumerate(codes)]
        streams = asyncio.gather(*(stream(lane, f"r{at}", own) for at, own in enumerate(codes)))
        async with lane.call(request("bad")) as call:
            send(call, bad, 0)
            with pytest.raises(StageProtocolError, match="frame 2 has code 500 in codebook 4"):
                await call.receive()
        async with lane.call(request("context")) as call:
            send(call, random_codes(5), 5)
            with pytest.raises(StageProtocolError, match="5 frames says that 5 are context"):
                await call.receive()
        async with lane.call(request("plan", ChunkPlan(5, 400, 25))) as call:
            with pytest.raises(InvalidRequest, match="makes windows of 425 frames"):
                await call.wait_accepted()
        together = await streams

    assert together == alone
    for pcm, own in zip(alone, codes, strict=True):
        whole = decoder(own[None])[0].numpy()
        np.testing.assert_allclose(np.frombuffer(pcm, "<f4"), whole, atol=2e-5)
