"""What speech calls return, in Python's own types."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import grpc

from omnistage import encodings
from omnistage.encodings import Encoding
from omnistage.files import new_file
from omnistage.v1 import speech_pb2
from stage_runtime.errors import OmnistageError, RemoteError

if TYPE_CHECKING:
    from omnistage.decoding import Samples

StopReason = Literal["end_of_audio", "max_frames"]
"""Why generation ended: the model said so, or the limit of frames was reached and the speech may be cut off."""


@dataclass(frozen=True, slots=True)
class SpeechUsage:
    """What a request consumed: tokens of the text alone and of the whole prompt, frames of 80 ms, samples."""

    text_token_count: int
    prompt_token_count: int
    frame_count: int
    sample_count: int


@dataclass(frozen=True, slots=True)
class SpeechTimings:
    """Wall-clock times from the request's arrival at the server: until it was accepted, first audio was there, all was there."""

    queue_s: float
    first_audio_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """Account of a finished synthesis. The same request with this `seed` gives the same audio."""

    request_id: str
    client_request_id: str
    model: str
    voice: str
    seed: int
    stop_reason: StopReason
    usage: SpeechUsage
    timings: SpeechTimings


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Head of a stream: the server's id of the request, its label, and what the audio will be like."""

    request_id: str
    client_request_id: str
    encoding: Encoding
    sample_rate_hz: int
    seed: int


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A piece of a stream. Pieces are contiguous; concatenated, their `audio` is the clip."""

    audio: bytes = field(repr=False)
    encoding: Encoding
    sample_rate_hz: int
    sample_offset: int
    sample_count: int

    @property
    def duration_s(self) -> float:
        """Playing time in seconds."""
        return self.sample_count / self.sample_rate_hz

    def samples(self) -> Samples:
        """Samples of this piece, shape (sample_count,), float32, full scale is 1."""
        from omnistage import decoding  # noqa: PLC0415 - brings numpy and libsndfile

        if self.encoding == "f32":
            return decoding.from_f32(self.audio)
        # the first piece of a WAV stream begins with the header
        return decoding.from_s16(self.audio[len(self.audio) - 2 * self.sample_count :])


@dataclass(frozen=True, slots=True)
class Clip:
    """A whole clip: `audio` in `encoding`, and how it was made."""

    audio: bytes = field(repr=False)
    encoding: Encoding
    sample_rate_hz: int
    result: SpeechResult

    @property
    def duration_s(self) -> float:
        """Playing time in seconds."""
        return self.result.usage.sample_count / self.sample_rate_hz

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `audio` to a file. It appears under its name when it is complete. Raises OSError."""
        with new_file(path) as file:
            file.write(self.audio)

    def samples(self) -> Samples:
        """Samples, shape (samples,), float32, full scale is 1. opus and mp3 may have a few more or less than were encoded."""
        from omnistage import decoding  # noqa: PLC0415 - brings numpy and libsndfile

        return decoding.decode(self.audio, self.encoding)


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice that requests can name. `language_codes` are BCP-47 primary subtags, empty if the model does not say."""

    name: str
    model: str
    language_codes: tuple[str, ...]


def clip(response: speech_pb2.SynthesizeResponse) -> Clip:
    """The answer of Synthesize."""
    return Clip(
        response.audio, encodings.from_proto(response.encoding), response.sample_rate_hz, _result(response.result)
    )


def voices(response: speech_pb2.ListVoicesResponse) -> list[Voice]:
    """The answer of ListVoices."""
    return [Voice(voice.name, voice.model, tuple(voice.language_codes)) for voice in response.voices]


class SpeechReader:
    """Turns the messages of one synthesis stream into chunks, and notices if any is missing."""

    def __init__(self) -> None:
        self.started: SpeechStarted | None = None
        self.error: OmnistageError | None = None
        self._result: SpeechResult | None = None
        self._sample_count = 0

    @property
    def result(self) -> SpeechResult:
        """Account of the synthesis. Raises the stream's error if it failed, RuntimeError if it was not read to its end."""
        if self.error is not None:
            raise self.error
        if self._result is None:
            raise RuntimeError("the stream was not read to its end; its result comes last")
        return self._result

    def feed(self, message: speech_pb2.StreamSynthesizeResponse) -> AudioChunk | None:
        """Take the next message; returns its audio if it has any. Raises RemoteError if it does not fit those before it."""
        match message.WhichOneof("message"):
            case "started" if self.started is None:
                self.started = _started(message.started)
            case "audio" if self.started is not None and self._result is None:
                return self._chunk(message.audio, self.started)
            case "finished" if self.started is not None and self._result is None:
                self._finish(message.finished)
            case None:
                pass  # a kind of message that servers may send one day
            case kind:
                raise _broken(f"{kind!r} came when it must not")
        return None

    def end(self) -> None:
        """The server says that the stream ended well. Raises RemoteError if its last message is missing."""
        if self._result is None:
            raise _broken(f"it ended after {self._sample_count} samples without a final message")

    def _chunk(self, audio: speech_pb2.AudioChunk, started: SpeechStarted) -> AudioChunk:
        if audio.sample_offset != self._sample_count:
            raise _broken(f"sample {self._sample_count} was due, {audio.sample_offset} came")
        self._sample_count += audio.sample_count
        return AudioChunk(
            audio.audio, started.encoding, started.sample_rate_hz, audio.sample_offset, audio.sample_count
        )

    def _finish(self, result: speech_pb2.SpeechResult) -> None:
        if result.usage.sample_count != self._sample_count:
            raise _broken(f"it has {result.usage.sample_count} samples, of which {self._sample_count} came")
        self._result = _result(result)


def _started(head: speech_pb2.SpeechStarted) -> SpeechStarted:
    return SpeechStarted(
        head.request_id, head.client_request_id, encodings.from_proto(head.encoding), head.sample_rate_hz, head.seed
    )


def _result(result: speech_pb2.SpeechResult) -> SpeechResult:
    usage, timings = result.usage, result.timings
    return SpeechResult(
        request_id=result.request_id,
        client_request_id=result.client_request_id,
        model=result.model,
        voice=result.voice,
        seed=result.seed,
        stop_reason=_stop_reason(result.stop_reason),
        usage=SpeechUsage(usage.text_token_count, usage.prompt_token_count, usage.frame_count, usage.sample_count),
        timings=SpeechTimings(
            timings.queue.ToTimedelta().total_seconds(),
            timings.first_audio.ToTimedelta().total_seconds(),
            timings.total.ToTimedelta().total_seconds(),
        ),
    )


def _stop_reason(value: speech_pb2.StopReason.ValueType) -> StopReason:
    if value not in (speech_pb2.STOP_REASON_END_OF_AUDIO, speech_pb2.STOP_REASON_MAX_FRAMES):
        raise _broken(f"it gives stop reason {value}, which this client does not know")
    return "max_frames" if value == speech_pb2.STOP_REASON_MAX_FRAMES else "end_of_audio"


def _broken(detail: str) -> RemoteError:
    return RemoteError(grpc.StatusCode.INTERNAL, f"the server sent a faulty answer: {detail}")
