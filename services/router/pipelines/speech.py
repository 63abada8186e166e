"""The speech pipeline: thinker ⇄ acoustic once for each 80 ms frame, frames to the codec in chunks, audio out.

    thinker ── hidden ──▶ acoustic ── codes ──▶ chunk plan ──▶ codec ── pcm ──▶ emit
       ▲                     │
       └────── codes ────────┘

What a request awaits here can fail only that request. Frames of a request stay in this coroutine until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from omnistage.stage.v1 import stage_pb2
from services.router.chunks import Chunk, ChunkPlan, plan_chunk
from services.router.replicas import StagePool
from stage_runtime.errors import StageProtocolError
from stage_runtime.lane_client import CallRequest, Lane, OutputRow, StageCall
from stage_runtime.tensors import DType, Rows

END_AUDIO = 1
# An END_AUDIO as the very first frame would be silence in answer to a text: the model is asked for one frame at least.
MIN_FRAMES = 1
# Chunks made but not decoded yet; more would only be memory.
CHUNKS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class SpeechJob:
    """A checked request. `deadline` is on the monotonic clock."""

    request_id: str
    text: str
    voice: str
    seed: int
    max_frames: int
    cfg_alpha: float
    deadline: float | None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class SpeechStages:
    """The pools that fill the pipeline's roles, and how frames are cut into chunks."""

    thinker: StagePool
    acoustic: StagePool
    codec: StagePool
    plan: ChunkPlan
    samples_per_frame: int
    codebook_count: int


@dataclass(frozen=True, slots=True)
class Audio:
    """Samples of one chunk: float32, mono, little-endian."""

    pcm: bytes
    sample_offset: int
    sample_count: int


@dataclass(slots=True)
class SpeechOutcome:
    """What a request came to. Times are on the monotonic clock."""

    text_token_count: int
    prompt_token_count: int
    accepted_at: float
    frame_count: int = 0
    ended_by_model: bool = False
    first_audio_at: float = 0.0
    sample_count: int = 0


Emit = Callable[[Audio], Awaitable[None]]
Started = Callable[[SpeechOutcome], Awaitable[None]]
_Chunks = asyncio.Queue[tuple[Chunk, Rows] | None]


async def speak(job: SpeechJob, stages: SpeechStages, started: Started, emit: Emit) -> SpeechOutcome:
    """Make speech; `started` is awaited when the thinker has taken the request, `emit` for each chunk of audio, in order.

    Raises what a stage failed the request with, StageReplicaLost or StageUnavailable. Whatever ends this coroutine, its work on
    every stage is aborted.
    """
    async with stages.thinker.place(_call(job, _thinker_params(job))) as (thinker, _):
        accepted = await thinker.wait_accepted()
        outcome = SpeechOutcome(accepted.text_token_count, accepted.prompt_token_count, accepted_at=time.monotonic())
        async with (
            stages.acoustic.place(_call(job, _acoustic_params(job))) as (acoustic, acoustic_lane),
            stages.codec.place(_call(job, _codec_params(stages.plan))) as (codec, codec_lane),
        ):
            await started(outcome)
            chunks: _Chunks = asyncio.Queue(CHUNKS_AHEAD)
            async with asyncio.TaskGroup() as group:
                group.create_task(_decode(stages, chunks, _Decoder(codec, codec_lane, outcome, emit)))
                await _generate(job, stages, _Generator(thinker, acoustic, acoustic_lane, chunks, outcome))
    return outcome


@dataclass(frozen=True, slots=True)
class _Generator:
    thinker: StageCall
    acoustic: StageCall
    acoustic_lane: Lane
    chunks: _Chunks
    outcome: SpeechOutcome


@dataclass(frozen=True, slots=True)
class _Decoder:
    codec: StageCall
    lane: Lane
    outcome: SpeechOutcome
    emit: Emit


async def _generate(job: SpeechJob, stages: SpeechStages, work: _Generator) -> None:
    """Make frames until the model ends or the cap is reached, and cut them into chunks."""
    frames: list[bytes] = []
    sent = 0
    finished = False
    while not finished:
        hidden = _output(await work.thinker.receive(), "hidden")
        work.acoustic.send({"hidden": hidden})
        codes = _output(await work.acoustic.receive(), "codes")
        if codes.row_shape != (stages.codebook_count,):
            work.acoustic_lane.condemn(f"a frame had shape {codes.row_shape}")
            raise StageProtocolError(f"a frame has shape {codes.row_shape}, not ({stages.codebook_count},)")
        frame = bytes(codes.data)
        if int.from_bytes(frame[:4], "little") == END_AUDIO:
            work.outcome.ended_by_model = finished = True
        else:
            frames.append(frame)
            finished = len(frames) == job.max_frames
        if not finished:
            work.thinker.send({"codes": codes})
        while (chunk := plan_chunk(len(frames), sent, finished=finished, plan=stages.plan)) is not None:
            sent += chunk.new
            await work.chunks.put((chunk, _window(frames, sent, chunk, stages.codebook_count)))
    work.outcome.frame_count = len(frames)
    work.thinker.end()
    work.acoustic.end()
    await work.chunks.put(None)


async def _decode(stages: SpeechStages, chunks: _Chunks, work: _Decoder) -> None:
    """Decode chunks in order and emit their audio."""
    while (item := await chunks.get()) is not None:
        chunk, window = item
        work.codec.send({"codes": window}, context_count=chunk.ctx)
        pcm = _output(await work.codec.receive(), "pcm")
        if pcm.row_count != chunk.new * stages.samples_per_frame:
            work.lane.condemn(f"{chunk.new} frames became {pcm.row_count} samples")
            raise StageProtocolError(
                f"{chunk.new} frames became {pcm.row_count} samples, not {chunk.new * stages.samples_per_frame}"
            )
        outcome = work.outcome
        if not outcome.sample_count:
            outcome.first_audio_at = time.monotonic()
        audio = Audio(bytes(pcm.data), outcome.sample_count, pcm.row_count)
        outcome.sample_count += pcm.row_count
        await work.emit(audio)
    work.codec.end()


def _output(row: OutputRow | None, name: str) -> Rows:
    if row is None:
        raise StageProtocolError(f"the stage finished the request where {name!r} was due")
    return row.tensors[name]


def _window(frames: list[bytes], end: int, chunk: Chunk, codebook_count: int) -> Rows:
    """Frames [end - new - ctx, end) as rows (ctx + new, K) int32."""
    count = chunk.ctx + chunk.new
    return Rows(DType.I32, (codebook_count,), b"".join(frames[end - count : end]), (count,))


def _call(
    job: SpeechJob,
    params: stage_pb2.SpeechThinkerParams | stage_pb2.SpeechAcousticParams | stage_pb2.SpeechCodecParams,
) -> CallRequest:
    return CallRequest(job.request_id, params, deadline=job.deadline, traceparent=job.traceparent)


def _thinker_params(job: SpeechJob) -> stage_pb2.SpeechThinkerParams:
    return stage_pb2.SpeechThinkerParams(text=job.text, voice=job.voice, max_frames=job.max_frames)


def _acoustic_params(job: SpeechJob) -> stage_pb2.SpeechAcousticParams:
    return stage_pb2.SpeechAcousticParams(cfg_alpha=job.cfg_alpha, seed=job.seed, min_frames=MIN_FRAMES)


def _codec_params(plan: ChunkPlan) -> stage_pb2.SpeechCodecParams:
    return stage_pb2.SpeechCodecParams(
        first_chunk_frames=plan.first_chunk_frames, chunk_frames=plan.chunk_frames, context_frames=plan.context_frames
    )
