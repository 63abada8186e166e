"""Synthesis by both clients: what is sent, what comes back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import soundfile

from omnistage import Encoding, InvalidRequest, OmnistageError, RemoteError
from omnistage.encodings import STREAM_ENCODINGS
from omnistage.v1 import speech_pb2

MAGIC = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS"}


def test_a_clip_tells_what_was_made(client: Any) -> None:
    """The clip has audio, encoding, rate, duration and the whole account of the request."""
    clip = client.call("synthesize", "Hi", voice="amy", seed=7, client_request_id="mine", model="speech")

    assert (clip.encoding, clip.sample_rate_hz, clip.duration_s) == ("wav", 24_000, 3 * 0.08)
    assert len(clip.audio) == 44 + 2 * 3 * 1920
    result = clip.result
    assert (result.request_id, result.client_request_id, result.model) == ("r-1", "mine", "speech")
    assert (result.voice, result.seed, result.stop_reason) == ("amy", 7, "end_of_audio")
    assert (result.usage.text_token_count, result.usage.prompt_token_count) == (2, 9)
    assert (result.usage.frame_count, result.usage.sample_count) == (3, 5760)
    assert (result.timings.queue_s, result.timings.first_audio_s, result.timings.total_s) == (0.001, 0.02, 0.3)


@pytest.mark.parametrize("method", ["synthesize", "stream"])
def test_options_reach_the_server_as_given(client: Any, server: Any, method: str) -> None:
    """Every option is in the request, and those that are not given are unset there, but for the seed."""
    options = {
        "voice": "bob",
        "seed": 2**63 - 1,
        "max_frames": 12,
        "cfg_alpha": 0.5,
        "language_code": "en-GB",
        "client_request_id": "label",
        "model": "speech",
    }

    client.call(method, "Grüße", **options)
    client.call(method, "Hi", voice="amy", max_frames=None)

    assert server.inputs[0] == speech_pb2.SpeechInput(text="Grüße", **options)
    seed = server.inputs[1].seed
    assert server.inputs[1] == speech_pb2.SpeechInput(text="Hi", voice="amy", seed=seed)


def test_requests_without_a_seed_get_one_of_their_own(client: Any, server: Any) -> None:
    """The client draws another seed for each request without one, and the result tells it."""
    clips = [client.call("synthesize", "Hi", voice="amy") for _ in range(3)]

    assert [clip.result.seed for clip in clips] == [sent.seed for sent in server.inputs]
    assert len({sent.seed for sent in server.inputs}) == 3


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_every_encoding_decodes_to_the_samples(client: Any, server: Any, encoding: str) -> None:
    """Each encoding name gives bytes of that encoding, and samples() gives what the server encoded."""
    server.behaviour.chunk_count = 25

    clip = client.call("synthesize", "Hi", voice="amy", encoding=encoding)

    assert clip.encoding == encoding
    assert clip.audio.startswith(MAGIC.get(encoding, b""))
    samples = clip.samples()
    assert samples.dtype == np.float32
    if encoding in {"opus", "mp3"}:
        # lossy: the length agrees within a codec frame, the tone in strength
        assert abs(len(samples) - 48_000) < 0.06 * 24_000
        assert np.std(samples) == pytest.approx(np.std(server.samples()), rel=0.1)
    else:
        tolerance = 0 if encoding == "f32" else 0.51 / 32767
        np.testing.assert_allclose(samples, server.samples(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("encoding", STREAM_ENCODINGS)
def test_streamed_chunks_are_the_clip(client: Any, server: Any, encoding: str) -> None:
    """Chunks are contiguous, joined they are the clip but for a WAV's lengths, and their samples are those of the clip."""
    chunks: list[Any] = []

    result = client.stream(chunks, "Hi", voice="amy", encoding=encoding, seed=5)

    clip = client.call("synthesize", "Hi", voice="amy", encoding=encoding, seed=5)
    assert result == clip.result
    assert [chunk.sample_offset for chunk in chunks] == [0, 1920, 3840]
    assert {(chunk.encoding, chunk.sample_rate_hz, chunk.duration_s) for chunk in chunks} == {(encoding, 24_000, 0.08)}
    joined = b"".join(chunk.audio for chunk in chunks)
    start = 44 if encoding == "wav" else 0
    assert (len(joined), joined[start:]) == (len(clip.audio), clip.audio[start:])
    samples = np.concatenate([chunk.samples() for chunk in chunks])
    np.testing.assert_array_equal(samples, clip.samples())


def test_audio_that_is_not_in_its_encoding_is_refused(client: Any) -> None:
    """samples() of damaged audio raises ValueError and says what it should have been."""
    clip = client.call("synthesize", "Hi", voice="amy", encoding="flac")
    damaged = type(clip)(b"nothing", "flac", 24_000, clip.result)

    with pytest.raises(ValueError, match="no flac"):
        damaged.samples()


def test_a_saved_clip_can_be_read_by_others(client: Any, tmp_path: Path) -> None:
    """save() writes the bytes under the name, in place of an older file, and leaves nothing else."""
    path = tmp_path / "clip.wav"
    path.write_bytes(b"older")
    clip = client.call("synthesize", "Hi", voice="amy")

    clip.save(path)

    samples, rate_hz = soundfile.read(io.BytesIO(path.read_bytes()))
    assert (len(samples), rate_hz) == (5760, 24_000)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seed": 2**63}, "input.seed"),
        ({"max_frames": -(2**31) - 1}, "input.max_frames"),
        ({"client_request_id": "\ud800"}, "input.client_request_id"),
        ({"encoding": "ogg"}, "encoding"),
    ],
)
@pytest.mark.parametrize("method", ["synthesize", "stream"])
def test_values_that_cannot_be_sent_are_refused_as_the_server_would(
    client: Any, server: Any, method: str, options: dict[str, Any], field: str
) -> None:
    """A value outside of its field's type is an InvalidRequest that names the field; nothing is sent."""
    with pytest.raises(InvalidRequest) as caught:
        client.call(method, "Hi", voice="amy", **options)

    assert [violation.field for violation in caught.value.violations] == [field]
    assert server.call_counts == {}


def test_unknown_options_are_refused(client: Any, server: Any) -> None:
    """A misspelt option is a TypeError that names the right ones."""
    with pytest.raises(TypeError, match=r"sede; there are: model, seed"):
        client.call("synthesize", "Hi", voice="amy", sede=1)

    assert server.call_counts == {}


def _without_end(messages: list[Any]) -> list[Any]:
    return messages[:-1]


def _with_gap(messages: list[Any]) -> list[Any]:
    return [*messages[:2], *messages[3:]]


def _short(messages: list[Any]) -> list[Any]:
    return [*messages[:3], messages[-1]]


def _without_head(messages: list[Any]) -> list[Any]:
    return messages[1:]


def _two_ends(messages: list[Any]) -> list[Any]:
    return [*messages, messages[-1]]


@pytest.mark.parametrize(
    ("alter", "detail"),
    [
        (_without_end, "without a final message"),
        (_with_gap, "sample 1920 was due, 3840 came"),
        (_short, "has 5760 samples, of which 3840 came"),
        (_without_head, "'audio' came when it must not"),
        (_two_ends, "'finished' came when it must not"),
    ],
)
def test_a_stream_that_lacks_something_is_an_error(client: Any, server: Any, alter: Any, detail: str) -> None:
    """A stream that the server ends with OK, but that is not whole, raises instead of passing for complete."""
    server.behaviour.alter = alter

    with pytest.raises(RemoteError, match=detail):
        client.stream([], "Hi", voice="amy")


def test_messages_of_a_newer_server_are_passed_over(client: Any, server: Any) -> None:
    """A stream message of a kind that the client does not know does no harm."""
    server.behaviour.alter = lambda messages: [messages[0], speech_pb2.StreamSynthesizeResponse(), *messages[1:]]
    chunks: list[Any] = []

    client.stream(chunks, "Hi", voice="amy")

    assert len(chunks) == 3


def test_an_unknown_encoding_of_the_answer_is_an_error(client: Any, server: Any) -> None:
    """An answer in an encoding that the client does not know raises a RemoteError instead of being mistaken for another."""

    def alter(messages: list[Any]) -> list[Any]:
        messages[0].started.encoding = 77
        return messages

    server.behaviour.alter = alter

    with pytest.raises(OmnistageError, match="encoding 77"):
        client.stream([], "Hi", voice="amy")
