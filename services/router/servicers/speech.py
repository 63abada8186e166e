"""SpeechService: checks a request, runs the pipeline, encodes what comes out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from omnistage.v1 import speech_pb2, speech_pb2_grpc
from services.router.audio import check_encoding, encode, encode_chunk
from services.router.audio_pipe import AudioPipe
from services.router.pipelines.speech import Audio, SpeechJob, SpeechOutcome, speak
from services.router.requests import Ticket
from services.router.speech_request import check_speech
from services.router.system import SpeechPipeline, System
from stage_runtime.errors import OmnistageError
from stage_runtime.lane import duration

Context = grpc.aio.ServicerContext[Any, Any]
Encoding = speech_pb2.AudioEncoding


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A checked request that has its place."""

    pipeline: SpeechPipeline
    ticket: Ticket
    job: SpeechJob
    label: str
    sample_rate_hz: int

    def result(self, outcome: SpeechOutcome) -> speech_pb2.SpeechResult:
        """The account of a finished request."""
        arrived = self.ticket.arrived_at
        stop = speech_pb2.STOP_REASON_END_OF_AUDIO if outcome.ended_by_model else speech_pb2.STOP_REASON_MAX_FRAMES
        return speech_pb2.SpeechResult(
            request_id=self.job.request_id,
            client_request_id=self.label,
            model=self.pipeline.name,
            voice=self.job.voice,
            seed=self.job.seed,
            stop_reason=stop,
            usage=speech_pb2.SpeechUsage(
                text_token_count=outcome.text_token_count,
                prompt_token_count=outcome.prompt_token_count,
                frame_count=outcome.frame_count,
                sample_count=outcome.sample_count,
            ),
            timings=speech_pb2.SpeechTimings(
                queue=duration(outcome.accepted_at - arrived),
                first_audio=duration(outcome.first_audio_at - arrived),
                total=duration(time.monotonic() - arrived),
            ),
        )


class SpeechServicer(speech_pb2_grpc.SpeechServiceServicer):
    """See speech.proto."""

    def __init__(self, system: System) -> None:
        self._system = system

    async def Synthesize(
        self, request: speech_pb2.SynthesizeRequest, context: Context
    ) -> speech_pb2.SynthesizeResponse:
        """See speech.proto."""
        encoding = check_encoding(request.encoding or Encoding.AUDIO_ENCODING_WAV, stream=False)
        async with self._admit(request.input, context) as admitted:
            parts: list[bytes] = []

            async def emit(piece: Audio) -> None:
                parts.append(piece.pcm)

            outcome = await speak(admitted.job, admitted.pipeline.stages(), _nothing, emit)
            admitted.ticket.reached = "being encoded"
            rate = admitted.sample_rate_hz
            encoded = await asyncio.to_thread(lambda: encode(b"".join(parts), encoding, rate))
            return speech_pb2.SynthesizeResponse(
                audio=encoded, encoding=encoding, sample_rate_hz=rate, result=admitted.result(outcome)
            )

    async def StreamSynthesize(  # type: ignore[override]  # the stubs know only generators; grpc.aio also takes this form
        self, request: speech_pb2.StreamSynthesizeRequest, context: Context
    ) -> None:
        """See speech.proto."""
        encoding = check_encoding(request.encoding or Encoding.AUDIO_ENCODING_PCM_S16LE, stream=True)
        async with self._admit(request.input, context) as admitted:
            settings = admitted.pipeline.settings
            pipe = AudioPipe(settings.stream_buffer_chunks, settings.client_stall_s)
            async with asyncio.TaskGroup() as group:
                group.create_task(_produce(admitted, pipe, _Sender(context, encoding, admitted)))
                first = True
                async for piece in pipe:
                    data = encode_chunk(piece.pcm, encoding, admitted.sample_rate_hz, first=first)
                    chunk = speech_pb2.AudioChunk(
                        audio=data, sample_offset=piece.sample_offset, sample_count=piece.sample_count
                    )
                    await context.write(speech_pb2.StreamSynthesizeResponse(audio=chunk))
                    first = False
                if (outcome := pipe.outcome) is not None:
                    await context.write(speech_pb2.StreamSynthesizeResponse(finished=admitted.result(outcome)))

    async def ListVoices(
        self, request: speech_pb2.ListVoicesRequest, context: Context
    ) -> speech_pb2.ListVoicesResponse:
        """See speech.proto."""
        chosen = [self._system.pipeline(request.model)] if request.model else list(self._system.speech.values())
        voices = [
            speech_pb2.Voice(name=voice.name, model=pipeline.name, language_codes=voice.language_codes)
            for pipeline in chosen
            for voice in pipeline.facts().thinker.voices
        ]
        return speech_pb2.ListVoicesResponse(voices=sorted(voices, key=lambda voice: (voice.model, voice.name)))

    @asynccontextmanager
    async def _admit(self, request: speech_pb2.SpeechInput, context: Context) -> AsyncIterator[_Admitted]:
        """Check a request and hold its place. No stage has worked when this raises before its body runs."""
        pipeline = self._system.pipeline(request.model)
        facts = pipeline.facts()
        check_speech(request, pipeline.settings, facts)
        pipeline.check_up()
        track = self._system.requests.track(
            pipeline.admission,
            pipeline.finished,
            label=request.client_request_id,
            time_left_s=context.time_remaining(),
        )
        async with track as ticket:
            job = _job(request, pipeline, ticket, context)
            yield _Admitted(pipeline, ticket, job, request.client_request_id, facts.codec.sample_rate_hz)


@dataclass(frozen=True, slots=True)
class _Sender:
    context: Context
    encoding: Encoding.ValueType
    admitted: _Admitted

    async def started(self, _outcome: SpeechOutcome) -> None:
        """Send the head of the stream."""
        head = speech_pb2.SpeechStarted(
            request_id=self.admitted.job.request_id,
            client_request_id=self.admitted.label,
            encoding=self.encoding,
            sample_rate_hz=self.admitted.sample_rate_hz,
            seed=self.admitted.job.seed,
        )
        await self.context.write(speech_pb2.StreamSynthesizeResponse(started=head))


async def _produce(admitted: _Admitted, pipe: AudioPipe, sender: _Sender) -> None:
    """Run the pipeline into the pipe; an error waits there until the audio before it was sent."""
    try:
        outcome = await speak(admitted.job, admitted.pipeline.stages(), sender.started, pipe.put)
    except* OmnistageError as group:
        pipe.fail(group)
    else:
        pipe.finish(outcome)


async def _nothing(_outcome: SpeechOutcome) -> None:
    """Unary calls have no head."""


def _job(request: speech_pb2.SpeechInput, pipeline: SpeechPipeline, ticket: Ticket, context: Context) -> SpeechJob:
    settings = pipeline.settings
    metadata = dict(context.invocation_metadata() or ())
    return SpeechJob(
        request_id=ticket.request_id,
        text=request.text,
        voice=request.voice,
        seed=request.seed if request.HasField("seed") else secrets.randbits(63),
        max_frames=request.max_frames if request.HasField("max_frames") else settings.default_max_frames,
        cfg_alpha=request.cfg_alpha if request.HasField("cfg_alpha") else settings.default_cfg_alpha,
        deadline=ticket.deadline,
        traceparent=str(metadata.get("traceparent", ""))[:64],
    )
