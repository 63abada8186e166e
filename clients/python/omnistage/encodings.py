"""Names of audio encodings, as people write them, and what the API calls them."""

from __future__ import annotations

from typing import Final, Literal, get_args

import grpc

from omnistage.v1 import speech_pb2
from stage_runtime.errors import FieldViolation, InvalidRequest, RemoteError

Encoding = Literal["wav", "pcm", "f32", "flac", "opus", "mp3"]
"""Encoding of a clip or stream. All are mono at the model's rate.

wav: RIFF WAV of 16-bit samples. pcm: 16-bit signed little-endian samples, no header. f32: 32-bit float little-endian samples, no
header, not clipped. flac: 16-bit FLAC. opus: Opus in Ogg. mp3: MPEG layer III. Only wav, pcm and f32 can be streamed.
"""

_VALUES: Final[dict[Encoding, speech_pb2.AudioEncoding.ValueType]] = {
    "wav": speech_pb2.AUDIO_ENCODING_WAV,
    "pcm": speech_pb2.AUDIO_ENCODING_PCM_S16LE,
    "f32": speech_pb2.AUDIO_ENCODING_PCM_F32LE,
    "flac": speech_pb2.AUDIO_ENCODING_FLAC,
    "opus": speech_pb2.AUDIO_ENCODING_OGG_OPUS,
    "mp3": speech_pb2.AUDIO_ENCODING_MP3,
}
_NAMES: Final = {value: name for name, value in _VALUES.items()}

ENCODINGS: Final[tuple[Encoding, ...]] = get_args(Encoding)
STREAM_ENCODINGS: Final[tuple[Encoding, ...]] = ("wav", "pcm", "f32")


def to_proto(name: Encoding) -> speech_pb2.AudioEncoding.ValueType:
    """The API's value of a name. Raises InvalidRequest if there is no such encoding."""
    try:
        return _VALUES[name]
    except KeyError:
        description = f"is {name!r}; it must be one of {', '.join(ENCODINGS)}"
        raise InvalidRequest([FieldViolation("encoding", description, "UNSUPPORTED")]) from None


def from_proto(value: speech_pb2.AudioEncoding.ValueType) -> Encoding:
    """The name of a value that a server sent. Raises RemoteError if this client does not know it."""
    try:
        return _NAMES[value]
    except KeyError:
        raise RemoteError(
            grpc.StatusCode.INTERNAL, f"the server answered in audio encoding {value}, which this client does not know"
        ) from None
