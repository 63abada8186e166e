"""Encoding of samples for clients: float32 from the codec to what a request asked for. No format is ever substituted for another.

16-bit samples are round(x * 32767) of x clipped to [-1, 1], half to even. 32767 is the usual scale for speech and the one that
libsndfile writes with: it is symmetric, full scale of either sign has a code, and what is beyond it clips and never wraps.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import soundfile

from omnistage.v1 import speech_pb2
from stage_runtime.errors import FieldViolation, InvalidRequest

Encoding = speech_pb2.AudioEncoding

S16_SCALE = 32767
WAV_HEADER_BYTES = 44
UNKNOWN_LENGTH = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Format:
    """How an encoding is made from float32 little-endian samples.

    `whole` makes a clip of samples at a rate in Hz; `piece` makes a part of a stream, which begins with `head` of the rate. Without
    `piece` the encoding cannot be streamed. `rates_hz` holds the sample rates that it allows; None for any.
    """

    whole: Callable[[bytes, int], bytes]
    piece: Callable[[bytes], bytes] | None = None
    head: Callable[[int], bytes] = lambda _: b""
    rates_hz: frozenset[int] | None = None


def to_s16(pcm: bytes) -> bytes:
    """16-bit little-endian samples of float32 little-endian ones. Raises ValueError if one is NaN."""
    samples = np.frombuffer(pcm, "<f4")
    if np.isnan(samples).any():
        raise ValueError("a sample is NaN")
    return np.rint(np.clip(samples, -1.0, 1.0) * np.float32(S16_SCALE)).astype("<i2").tobytes()


def wav_header(data_bytes: int, sample_rate_hz: int) -> bytes:
    """The 44-byte header of a mono 16-bit WAV file; UNKNOWN_LENGTH for a stream, whose end is not known yet."""
    riff = UNKNOWN_LENGTH if data_bytes == UNKNOWN_LENGTH else WAV_HEADER_BYTES - 8 + data_bytes
    riff_chunk = struct.pack("<4sI4s", b"RIFF", riff, b"WAVE")
    # 16 bytes follow: plain PCM, 1 channel, samples and bytes for each second, 2 bytes for each sample, 16 bits.
    format_chunk = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, sample_rate_hz * 2, 2, 16)
    return riff_chunk + format_chunk + struct.pack("<4sI", b"data", data_bytes)


def check_encoding(
    encoding: Encoding.ValueType, *, stream: bool, sample_rate_hz: int | None = None
) -> Encoding.ValueType:
    """Return `encoding` if it can be made, as a stream or whole, at the sample rate if that is known.

    Raises InvalidRequest for the field "encoding", with the reason and the choices, if it cannot.
    """
    fault = _fault(encoding, stream=stream, sample_rate_hz=sample_rate_hz)
    if not fault:
        return encoding
    choices = [value for value in FORMATS if not _fault(value, stream=stream, sample_rate_hz=sample_rate_hz)]
    description = f"{_name(encoding)} {fault}; choose one of {', '.join(map(_name, choices))}"
    raise InvalidRequest([FieldViolation("encoding", description, "UNSUPPORTED")])


def encode(pcm: bytes, encoding: Encoding.ValueType, sample_rate_hz: int) -> bytes:
    """A whole clip of float32 little-endian samples in `encoding`, which `check_encoding` let pass.

    Takes up to 70 ms of a core for a second of audio (OGG_OPUS): run it off the event loop. Raises ValueError if a sample is NaN, or if
    there is none and the container cannot be empty (FLAC, OGG_OPUS, MP3).
    """
    return FORMATS[encoding].whole(pcm, sample_rate_hz)


def encode_chunk(pcm: bytes, encoding: Encoding.ValueType, sample_rate_hz: int, *, first: bool) -> bytes:
    """The next chunk of a stream; the first one of a WAV stream begins with the header. Raises ValueError if a sample is NaN."""
    form = FORMATS[encoding]
    if form.piece is None:
        raise ValueError(f"{_name(encoding)} cannot be streamed")
    return (form.head(sample_rate_hz) if first else b"") + form.piece(pcm)


def _fault(encoding: Encoding.ValueType, *, stream: bool, sample_rate_hz: int | None) -> str:
    """Why an encoding cannot be made, as the rest of a sentence; empty if it can."""
    if encoding in _LACKING:
        return f"cannot be made: libsndfile {soundfile.__libsndfile_version__} of this server was built without it"
    form = FORMATS.get(encoding)
    if form is None:
        return "is no encoding of this server"
    if stream and form.piece is None:
        return "cannot be streamed"
    if sample_rate_hz is not None and form.rates_hz is not None and sample_rate_hz not in form.rates_hz:
        return f"does not allow the model's {sample_rate_hz} Hz"
    return ""


def _name(encoding: Encoding.ValueType) -> str:
    """The encoding as clients write it, without its prefix; its number if it has no name."""
    if encoding not in Encoding.values():
        return str(int(encoding))
    return Encoding.Name(encoding).removeprefix("AUDIO_ENCODING_")


def _wav(pcm: bytes, sample_rate_hz: int) -> bytes:
    data = to_s16(pcm)
    return wav_header(len(data), sample_rate_hz) + data


def _as_is(pcm: bytes) -> bytes:
    return pcm


def _whole_by(container: str, subtype: str) -> Callable[[bytes, int], bytes]:
    """An encoder by libsndfile."""

    def whole(pcm: bytes, sample_rate_hz: int) -> bytes:
        samples = np.frombuffer(to_s16(pcm), "<i2")
        if not len(samples):
            raise ValueError(f"{container} cannot hold a clip without samples")
        buffer = io.BytesIO()
        with soundfile.SoundFile(buffer, "w", sample_rate_hz, 1, subtype, format=container) as file:
            file.write(samples)  # closing flushes the encoder's last block
        return buffer.getvalue()

    return whole


@dataclass(frozen=True, slots=True)
class _Compressed:
    container: str
    subtype: str
    rates_hz: frozenset[int] | None


_COMPRESSED = {
    Encoding.AUDIO_ENCODING_FLAC: _Compressed("FLAC", "PCM_16", None),
    Encoding.AUDIO_ENCODING_OGG_OPUS: _Compressed("OGG", "OPUS", frozenset({8_000, 12_000, 16_000, 24_000, 48_000})),
    Encoding.AUDIO_ENCODING_MP3: _Compressed(
        "MP3",
        "MPEG_LAYER_III",
        frozenset({8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000}),
    ),
}
# Builds of libsndfile differ in the codecs they have; this one is asked once, at import.
_LACKING = frozenset(
    encoding
    for encoding, form in _COMPRESSED.items()
    if form.container not in soundfile.available_formats()
    or form.subtype not in soundfile.available_subtypes(form.container)
)

FORMATS: Mapping[Encoding.ValueType, Format] = {
    Encoding.AUDIO_ENCODING_PCM_S16LE: Format(lambda pcm, _: to_s16(pcm), to_s16),
    Encoding.AUDIO_ENCODING_WAV: Format(_wav, to_s16, lambda rate: wav_header(UNKNOWN_LENGTH, rate)),
    Encoding.AUDIO_ENCODING_PCM_F32LE: Format(lambda pcm, _: pcm, _as_is),
} | {
    encoding: Format(_whole_by(form.container, form.subtype), rates_hz=form.rates_hz)
    for encoding, form in _COMPRESSED.items()
    if encoding not in _LACKING
}
