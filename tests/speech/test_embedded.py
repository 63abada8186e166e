"""Speech end to end on the embedded model: the same request gives the same samples, whatever else runs."""

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnistage import AsyncClient, Client, InvalidRequest, UnknownModel, UnknownVoice

REQUEST = {"voice": "tiny_a", "seed": 7, "max_frames": 40}
TEXT = "hello the world, 42!"


def digest(clip):
    """What is compared: the samples."""
    return hashlib.sha256(clip.audio).hexdigest()


def speak(system, text=TEXT, **options):
    """One clip of PCM."""
    with Client(system.address) as client:
        return client.synthesize(text, encoding="pcm", timeout_s=60, **{**REQUEST, **options})


def test_a_clip_has_1920_samples_for_each_frame_and_tells_why_it_ended(embedded):
    """Usage, stop reason and audio agree."""
    clip = speak(embedded)

    usage = clip.result.usage
    assert len(clip.audio) == 2 * usage.sample_count == 2 * 1920 * usage.frame_count > 0
    assert usage.prompt_token_count > usage.text_token_count > 0
    assert clip.result.stop_reason in {"end_of_audio", "max_frames"}


def test_the_cap_on_frames_is_kept_and_reported(embedded):
    """One frame is one frame."""
    clip = speak(embedded, max_frames=1)

    assert clip.result.usage.frame_count == 1
    assert clip.result.stop_reason == "max_frames"


def test_streamed_chunks_equal_the_whole_clip(embedded):
    """Offsets are contiguous and the concatenation is bit-equal."""
    whole = speak(embedded)
    with Client(embedded.address) as client, client.stream(TEXT, encoding="pcm", timeout_s=60, **REQUEST) as stream:
        chunks = list(stream)

    assert b"".join(chunk.audio for chunk in chunks) == whole.audio
    assert [chunk.sample_offset for chunk in chunks] == [
        sum(before.sample_count for before in chunks[:place]) for place in range(len(chunks))
    ]


def test_different_seeds_and_voices_differ(embedded):
    """Neither seed nor voice is ignored."""
    assert (
        len({digest(speak(embedded, seed=seed, voice=voice)) for seed in (1, 2) for voice in ("tiny_a", "tiny_b")}) == 4
    )


async def many(system, count, **options):
    """Clips of `count` concurrent requests that differ in text and seed; the first is the standard one."""
    client = AsyncClient(system.address)
    texts = [TEXT, *[f"other text number {number}" for number in range(count - 1)]]
    try:
        return await asyncio.gather(
            *(
                client.synthesize(text, encoding="pcm", timeout_s=100, **{**REQUEST, "seed": 7 + place, **options})
                for place, text in enumerate(texts)
            )
        )
    finally:
        await client.close()


def test_a_request_sounds_the_same_among_fifteen_others(embedded):
    """Batch partners change no bit."""
    alone = digest(speak(embedded))

    clips = asyncio.run(many(embedded, 16))

    assert digest(clips[0]) == alone
    assert len({digest(clip) for clip in clips}) == 16


def test_thirty_two_concurrent_requests_complete_in_batches(embedded):
    """All succeed, and the acoustic stage's mean batch is above four rows."""
    with Client(embedded.address) as client:
        before = load(client, "acoustic")
        clips = asyncio.run(many(embedded, 32))
        embedded.wait(lambda c: load(c, "acoustic").row_count - before.row_count >= sum_frames(clips), 10)
        after = load(client, "acoustic")

    rows, steps = after.row_count - before.row_count, after.step_count - before.step_count
    assert len(clips) == 32
    assert rows / steps > 4


def sum_frames(clips):
    """Frames that were made for some clips."""
    return sum(clip.result.usage.frame_count for clip in clips)


def load(client, stage):
    """Load of the first replica of a stage."""
    return next(s for s in client.stages() if s.name == stage).replicas[0].load


@pytest.mark.slow
def test_two_replicas_and_a_restart_change_no_bit(embedded, start_embedded):
    """Another process, another replica, other partners: the same samples."""
    expected = digest(speak(embedded))

    with start_embedded(2) as pair:
        clips = asyncio.run(many(pair, 12))
        again = [digest(speak(pair)) for _ in range(2)]

    assert {digest(clips[0]), *again} == {expected}


BAD = {
    "empty text": ({"text": ""}, "input.text", "visible character"),
    "blank text": ({"text": " \t\n"}, "input.text", "visible character"),
    "ideographic space": ({"text": "\u3000\u00a0"}, "input.text", "visible character"),
    "invisible characters": ({"text": "\u200b\ufeff\u2060"}, "input.text", "visible character"),
    "control characters": ({"text": "\x00\x07\x1b"}, "input.text", "visible character"),
    "too long": ({"text": "word " * 9000}, "input.text", "has 45000 characters; the limit is 4096"),
    "long word": ({"text": "a" * 5000}, "input.text", "has 5000 characters; the limit is 4096"),
    "no voice": ({"voice": ""}, "input.voice", "tiny_a, tiny_b"),
    "negative seed": ({"seed": -1}, "input.seed", "0 to 2^63-1"),
    "no frames": ({"max_frames": 0}, "input.max_frames", "1 to 4096"),
    "too many frames": ({"max_frames": 4097}, "input.max_frames", "1 to 4096"),
    "NaN guidance": ({"cfg_alpha": float("nan")}, "input.cfg_alpha", "0 to 10"),
    "infinite guidance": ({"cfg_alpha": float("inf")}, "input.cfg_alpha", "0 to 10"),
    "language": ({"language_code": "fr"}, "input.language_code", "leave the field empty"),
    "label": ({"client_request_id": "ä"}, "input.client_request_id", "printable ASCII"),
}


@pytest.mark.parametrize(("change", "field", "text"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_input_is_refused_before_any_stage_works(embedded, change, field, text, stream):
    """Code, field and text are right, at once, and no stage has taken a step."""
    options = {"text": TEXT, **REQUEST, **change}
    with Client(embedded.address) as client:
        before = load(client, "thinker").step_count
        started = time.monotonic()
        with pytest.raises(InvalidRequest) as caught:
            list(client.stream(**options)) if stream else client.synthesize(**options)

        assert time.monotonic() - started < 1.0
        assert [violation.field for violation in caught.value.violations] == [field]
        assert text in caught.value.violations[0].description
        assert load(client, "thinker").step_count == before


@pytest.mark.parametrize("voice", ["no_such_voice", " tiny_a", "TINY_A", "v" * 300, "../../etc/passwd", "a/b", "a\0b"])
def test_an_unknown_voice_is_not_found_and_lists_the_valid_ones(embedded, voice):
    """Names match exactly, never a path."""
    with pytest.raises(UnknownVoice, match="tiny_a, tiny_b"):
        speak(embedded, voice=voice)


def test_an_unknown_model_is_not_found_and_lists_the_valid_ones(embedded):
    """MODEL_NOT_FOUND names the pipeline there is."""
    with pytest.raises(UnknownModel, match="speech"):
        speak(embedded, model="other")


def test_all_faults_are_told_at_once(embedded):
    """Three faulty fields give three violations."""
    with pytest.raises(InvalidRequest) as caught:
        speak(embedded, text="", voice="", seed=-5)

    assert {violation.field for violation in caught.value.violations} == {"input.text", "input.voice", "input.seed"}


@pytest.mark.parametrize("encoding", ["wav", "flac", "opus", "mp3", "f32"])
def test_every_encoding_is_what_it_says(embedded, encoding):
    """Magic bytes fit, and lossless ones hold the same samples as pcm."""
    pcm = speak(embedded).audio
    with Client(embedded.address) as client:
        clip = client.synthesize(TEXT, encoding=encoding, timeout_s=60, **REQUEST)

    magic = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "mp3": b"\xff", "f32": b""}[encoding]
    assert clip.audio.startswith(magic)
    if encoding == "wav":
        assert clip.audio[44:] == pcm
    if encoding == "f32":
        assert len(clip.audio) == 2 * len(pcm)


def test_voices_are_the_same_everywhere(embedded):
    """GRPC client and command line list the same names."""
    with Client(embedded.address) as client:
        names = [voice.name for voice in client.voices()]
    command = [str(Path(sys.executable).parent / "omnistage"), "voices", "--json", "--address", embedded.address]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert names == ["tiny_a", "tiny_b"]
    assert all(name in output for name in names)


def grpcurl(system, *arguments):
    """Run grpcurl against the router's socket."""
    binary = Path(sys.executable).parent / "grpcurl"
    command = [str(binary), "-plaintext", "-unix", "-max-msg-sz", "67108864", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30, env=os.environ)


def test_grpcurl_lists_describes_checks_and_speaks(embedded):
    """What users type works without protos at hand."""
    socket = embedded.address.removeprefix("unix:")

    listed = grpcurl(embedded, socket, "list").stdout.split()
    assert {"omnistage.v1.SpeechService", "omnistage.v1.PipelineService", "grpc.health.v1.Health"} <= set(listed)
    assert "rpc Synthesize" in grpcurl(embedded, socket, "describe", "omnistage.v1.SpeechService").stdout
    for name in ("", "omnistage.v1.SpeechService", "stage/thinker", "stage/acoustic", "stage/codec"):
        checked = grpcurl(embedded, "-d", f'{{"service":"{name}"}}', socket, "grpc.health.v1.Health/Check")
        assert '"SERVING"' in checked.stdout, (name, checked)
    body = '{"input":{"text":"hello","voice":"tiny_a","seed":7,"max_frames":5}}'
    spoken = grpcurl(embedded, "-d", body, socket, "omnistage.v1.SpeechService/Synthesize")
    assert '"sample_rate_hz": 24000' in spoken.stdout or '"sampleRateHz": 24000' in spoken.stdout, spoken
