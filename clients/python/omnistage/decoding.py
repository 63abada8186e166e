"""Audio bytes to samples; apart from the rest, as only those who ask for samples need numpy and libsndfile."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import soundfile

from omnistage.encodings import Encoding

Samples = npt.NDArray[np.float32]

# What the server scales float samples by: full scale of either sign is +-32767.
_S16_SCALE = np.float32(32767)


def decode(audio: bytes, encoding: Encoding) -> Samples:
    """Samples of a whole clip, shape (samples,), float32. Raises ValueError if `audio` is not in `encoding`."""
    match encoding:
        case "pcm":
            return from_s16(audio)
        case "f32":
            return from_f32(audio)
        case "wav" | "flac":
            # 16-bit containers; libsndfile's own floats would have another scale than "pcm" has here
            return _read(audio, encoding, "int16").astype(np.float32) / _S16_SCALE
        case "opus" | "mp3":
            return _read(audio, encoding, "float32").astype(np.float32)


def from_s16(audio: bytes) -> Samples:
    """Samples of 16-bit signed little-endian bytes, full scale is 1."""
    return np.frombuffer(audio, "<i2").astype(np.float32) / _S16_SCALE


def from_f32(audio: bytes) -> Samples:
    """Samples of 32-bit float little-endian bytes."""
    return np.frombuffer(audio, "<f4").astype(np.float32)


def _read(audio: bytes, encoding: Encoding, dtype: str) -> npt.NDArray[np.generic]:
    try:
        samples, _ = soundfile.read(io.BytesIO(audio), dtype=dtype)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{len(audio)} bytes of audio are no {encoding}: {error}") from error
    result: npt.NDArray[np.generic] = samples
    return result
