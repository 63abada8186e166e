"""Encodings: exact PCM, headers, durations, clipping, refusals."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import wave

import numpy as np
import pytest
import soundfile

from omnistage.v1 import speech_pb2
from services.router import audio
from stage_runtime.errors import InvalidRequest

RATE = 24_000
PCM_S16LE = speech_pb2.AUDIO_ENCODING_PCM_S16LE
PCM_F32LE = speech_pb2.AUDIO_ENCODING_PCM_F32LE
WAV = speech_pb2.AUDIO_ENCODING_WAV
FLAC = speech_pb2.AUDIO_ENCODING_FLAC
OGG_OPUS = speech_pb2.AUDIO_ENCODING_OGG_OPUS
MP3 = speech_pb2.AUDIO_ENCODING_MP3
ALL = (PCM_S16LE, WAV, PCM_F32LE, FLAC, OGG_OPUS, MP3)
COMPRESSED = (FLAC, OGG_OPUS, MP3)

MAGIC = {WAV: b"RIFF", FLAC: b"fLaC", OGG_OPUS: b"OggS"}


def name(encoding: int) -> str:
    """For test ids."""
    return speech_pb2.AudioEncoding.Name(encoding).removeprefix("AUDIO_ENCODING_")


def voice(seconds: float) -> np.ndarray:
    """A tone that swells and wavers, with a little noise, within (-0.8, 0.8)."""
    count = round(seconds * RATE)
    t = np.arange(count) / RATE
    tone = np.sin(2 * np.pi * 180 * t + 4 * np.sin(2 * np.pi * 3 * t)) * (0.4 + 0.3 * np.sin(2 * np.pi * 0.7 * t))
    return (tone + np.random.default_rng(0).normal(0, 0.01, count)).astype("<f4")


def s16(samples: np.ndarray) -> np.ndarray:
    """16-bit samples, by plain arithmetic in double precision."""
    return np.array([int(np.rint(min(max(float(x), -1.0), 1.0) * 32767)) for x in samples], "<i2")


def test_s16_rounds_clips_and_never_wraps() -> None:
    """Both full scales are reached, beyond them it clips, halves go to the even neighbour, silence is 0."""
    half = 0.5 / 32767
    samples = np.array([0, -0.0, 1, -1, 1.5, -1.5, 1e30, -np.inf, np.inf, half, 3 * half, 1 + 1e-7], "<f4")

    found = np.frombuffer(audio.to_s16(samples.tobytes()), "<i2").tolist()

    assert found == [0, 0, 32767, -32767, 32767, -32767, 32767, -32767, 32767, 0, 2, 32767]


def test_s16_is_the_rounded_product() -> None:
    """For samples all over the range."""
    samples = np.random.default_rng(1).uniform(-1.2, 1.2, 5000).astype("<f4")

    found = np.frombuffer(audio.to_s16(samples.tobytes()), "<i2")

    # In float32 the product may fall on the other side of a half.
    assert np.abs(found.astype(int) - s16(samples)).max() <= 1
    assert (found != s16(samples)).mean() < 0.01


def test_s16_refuses_nan() -> None:
    """NaN has no 16-bit value; it must not become silence or noise."""
    with pytest.raises(ValueError, match="a sample is NaN"):
        audio.to_s16(np.array([0.5, np.nan], "<f4").tobytes())


def test_pcm_is_the_wav_without_its_header() -> None:
    """44 bytes of header, then the same bytes; even length; no RIFF at the start of PCM."""
    pcm = voice(0.5).tobytes()

    plain, wav = (audio.encode(pcm, encoding, RATE) for encoding in (PCM_S16LE, WAV))

    assert plain == wav[44:] == audio.to_s16(pcm)
    assert len(plain) == 2 * 12_000
    assert not plain.startswith(b"RIFF")


def test_wav_is_read_by_the_standard_library() -> None:
    """One channel, 16 bits, the rate, every sample; the sizes in the header are those of the file."""
    samples = voice(0.5)
    data = audio.encode(samples.tobytes(), WAV, RATE)

    with wave.open(io.BytesIO(data)) as file:
        assert file.getparams()[:4] == (1, 2, RATE, 12_000)
        assert file.readframes(99_999) == audio.to_s16(samples.tobytes())
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    assert int.from_bytes(data[40:44], "little") == len(data) - 44


def test_float_samples_leave_as_they_came() -> None:
    """PCM_F32LE is not clipped and not changed by a bit."""
    pcm = np.array([0.1, -3.5, 1e-30], "<f4").tobytes()

    assert audio.encode(pcm, PCM_F32LE, RATE) == pcm
    assert audio.encode_chunk(pcm, PCM_F32LE, RATE, first=True) == pcm


@pytest.mark.parametrize("seconds", [0.5, 1.0, 5.02, 9.9])
@pytest.mark.parametrize("encoding", ALL, ids=name)
def test_every_container_lasts_as_long_as_its_samples(encoding: int, seconds: float) -> None:
    """No container loses its end: rate and duration are those of the PCM, and the last 50 ms are heard."""
    samples = voice(seconds)
    data = audio.encode(samples.tobytes(), encoding, RATE)

    if encoding in {PCM_S16LE, PCM_F32LE}:
        read = np.frombuffer(data, {PCM_S16LE: "<i2", PCM_F32LE: "<f4"}[encoding])
    else:
        read, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        assert rate == RATE
    assert abs(len(read) - len(samples)) / RATE < 0.06
    if encoding in COMPRESSED:
        end = slice(len(samples) - 1200, len(samples))
        heard = np.corrcoef(read[end], samples[end])[0, 1]
        assert heard > 0.9


@pytest.mark.parametrize("encoding", [WAV, *COMPRESSED], ids=name)
def test_bytes_are_what_the_encoding_says(encoding: int) -> None:
    """Magic numbers, by which players and the Content-Type of a gateway go."""
    data = audio.encode(voice(0.5).tobytes(), encoding, RATE)

    if encoding == MP3:  # frame sync, or an ID3 tag before it
        assert data[:3] == b"ID3" or (data[0] == 0xFF and data[1] & 0xE0 == 0xE0)
    else:
        assert data.startswith(MAGIC[encoding])
    if encoding == OGG_OPUS:
        assert b"OpusHead" in data[:64]


def test_flac_decodes_to_exactly_the_16_bit_samples() -> None:
    """Lossless, clipped samples included."""
    samples = voice(1.0) * 2
    data = audio.encode(samples.tobytes(), FLAC, RATE)

    read, _ = soundfile.read(io.BytesIO(data), dtype="int16")

    assert read.astype("<i2").tobytes() == audio.to_s16(samples.tobytes())
    assert soundfile.info(io.BytesIO(data)).subtype == "PCM_16"


@pytest.mark.parametrize("encoding", [PCM_S16LE, WAV, PCM_F32LE], ids=name)
def test_a_stream_put_together_is_the_whole_clip(encoding: int) -> None:
    """But for the lengths in the WAV header, which are 0xFFFFFFFF: unknown."""
    samples = voice(0.5)
    pieces = np.split(samples, [1920, 3840, 3841, 9600])

    stream = b"".join(
        audio.encode_chunk(piece.tobytes(), encoding, RATE, first=at == 0) for at, piece in enumerate(pieces)
    )

    whole = audio.encode(samples.tobytes(), encoding, RATE)
    if encoding == WAV:
        assert stream[4:8] == stream[40:44] == b"\xff" * 4
        assert stream[:4] + stream[8:40] == whole[:4] + whole[8:40]
        assert stream[44:] == whole[44:]
    else:
        assert stream == whole


def test_only_plain_samples_can_be_streamed() -> None:
    """A container that is finished at its end only is refused, with the choices."""
    for encoding in (PCM_S16LE, WAV, PCM_F32LE):
        assert audio.check_encoding(encoding, stream=True) == encoding
    for encoding in COMPRESSED:
        assert audio.check_encoding(encoding, stream=False) == encoding
        with pytest.raises(InvalidRequest) as caught:
            audio.check_encoding(encoding, stream=True)
        (violation,) = caught.value.violations
        assert violation.field == "encoding"
        assert violation.reason == "UNSUPPORTED"
        text = f"{name(encoding)} cannot be streamed; choose one of PCM_S16LE, WAV, PCM_F32LE"
        assert violation.description == text
        with pytest.raises(ValueError, match="cannot be streamed"):
            audio.encode_chunk(b"", encoding, RATE, first=True)


@pytest.mark.parametrize("stream", [True, False])
def test_unknown_encodings_are_refused(*, stream: bool) -> None:
    """A number that this server does not know, or none: never replaced by a default here."""
    for value, shown in ((99, "99"), (0, "UNSPECIFIED")):
        with pytest.raises(InvalidRequest, match=f"encoding: {shown} is no encoding of this server; choose one of"):
            audio.check_encoding(value, stream=stream)


def test_rates_that_a_codec_does_not_have_are_refused() -> None:
    """Before anything is made: Opus has five rates only, MP3 nine, and the choices leave those out that do not fit."""
    assert audio.check_encoding(OGG_OPUS, stream=False, sample_rate_hz=24_000) == OGG_OPUS
    text = "OGG_OPUS does not allow the model's 22050 Hz; choose one of PCM_S16LE, WAV, PCM_F32LE, FLAC, MP3"
    with pytest.raises(InvalidRequest, match=text):
        audio.check_encoding(OGG_OPUS, stream=False, sample_rate_hz=22_050)
    with pytest.raises(InvalidRequest, match=r"MP3 does not allow the model's 96000 Hz; choose .* PCM_F32LE, FLAC$"):
        audio.check_encoding(MP3, stream=False, sample_rate_hz=96_000)


@pytest.mark.parametrize("encoding", COMPRESSED, ids=name)
def test_rates_that_are_let_pass_can_be_made(encoding: int) -> None:
    """The table of rates is what libsndfile takes."""
    pcm = voice(0.1).tobytes()
    for rate in (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000):
        try:
            audio.check_encoding(encoding, stream=False, sample_rate_hz=rate)
        except InvalidRequest:
            with pytest.raises(soundfile.LibsndfileError):
                audio.encode(pcm, encoding, rate)
        else:
            assert soundfile.info(io.BytesIO(audio.encode(pcm, encoding, rate))).samplerate == rate


def test_a_clip_without_samples() -> None:
    """PCM is empty and WAV its header alone; the other containers cannot be empty, so they refuse."""
    assert audio.encode(b"", PCM_S16LE, RATE) == audio.encode(b"", PCM_F32LE, RATE) == b""
    with wave.open(io.BytesIO(audio.encode(b"", WAV, RATE))) as file:
        assert (file.getnframes(), file.getframerate()) == (0, RATE)
    for encoding in COMPRESSED:
        with pytest.raises(ValueError, match="cannot hold a clip without samples"):
            audio.encode(b"", encoding, RATE)


@pytest.mark.parametrize("encoding", COMPRESSED, ids=name)
def test_the_shortest_clip(encoding: int) -> None:
    """A single frame of the codec makes a container of its length."""
    data = audio.encode(voice(0.08).tobytes(), encoding, RATE)

    assert abs(soundfile.info(io.BytesIO(data)).frames - 1920) / RATE < 0.06


WITHOUT_MP3_AND_FLAC = """
import json, soundfile
soundfile.available_subtypes = lambda container: {"OGG": {"OPUS": ""}, "MP3": {"MPEG_LAYER_II": ""}}[container]
soundfile.available_formats = lambda: {"OGG": "", "MP3": "", "WAV": ""}
from omnistage.v1 import speech_pb2
from services.router import audio
from stage_runtime.errors import InvalidRequest
told = {}
for value in speech_pb2.AudioEncoding.values()[1:]:
    try:
        audio.check_encoding(value, stream=False)
    except InvalidRequest as error:
        told[speech_pb2.AudioEncoding.Name(value)] = str(error)
print(json.dumps(told))
"""


def test_what_this_build_of_libsndfile_lacks_is_refused() -> None:
    """With a libsndfile that has no FLAC and no MP3 layer III, both are refused by name; Opus is still there."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_MP3_AND_FLAC], capture_output=True, text=True, check=True)

    told = json.loads(done.stdout)
    assert set(told) == {"AUDIO_ENCODING_FLAC", "AUDIO_ENCODING_MP3"}
    for error in told.values():
        assert f"libsndfile {soundfile.__libsndfile_version__} of this server was built without it" in error
        assert error.endswith("choose one of PCM_S16LE, WAV, PCM_F32LE, OGG_OPUS")
