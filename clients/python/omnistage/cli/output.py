"""Where `omnistage say` puts audio: a file that appears when it is complete, or standard output."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import BinaryIO, Final

import click

from omnistage.encodings import Encoding
from omnistage.files import new_file

STDOUT: Final = "-"
SUFFIXES: Final[dict[str, Encoding]] = {
    ".wav": "wav",
    ".pcm": "pcm",
    ".f32": "f32",
    ".flac": "flac",
    ".opus": "opus",
    ".ogg": "opus",
    ".mp3": "mp3",
}

_HEADER: Final = struct.Struct("<4sI4s4s20s4sI")


def encoding_of(output: str) -> Encoding:
    """The encoding that a file's suffix asks for; WAV for standard output. Raises click.UsageError for an unknown one."""
    if output == STDOUT:
        return "wav"
    suffix = PurePath(output).suffix.lower()
    if suffix not in SUFFIXES:
        raise click.UsageError(
            f"the suffix {suffix!r} of {output!r} tells no format; use one of {', '.join(SUFFIXES)}, or give --format"
        )
    return SUFFIXES[suffix]


@contextmanager
def open_output(output: str) -> Iterator[BinaryIO]:
    """The file to write to; see `new_file`. Raises click.UsageError if standard output is a terminal."""
    if output != STDOUT:
        with new_file(output) as file:
            yield file
        return
    if sys.stdout.isatty():
        raise click.UsageError("audio is not written to a terminal; redirect standard output, or give -o FILE")
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def finish_wav(file: BinaryIO) -> None:
    """Put the lengths into the header of a complete WAV stream. What cannot be rewound, such as a pipe, is left as it is."""
    if not (file.seekable() and file.readable()):
        return
    size = file.seek(0, 2)
    file.seek(0)
    riff, _, wave, fmt, head, data, _ = _HEADER.unpack(file.read(_HEADER.size))
    if (riff, wave, fmt, data) != (b"RIFF", b"WAVE", b"fmt ", b"data"):
        raise click.ClickException("the server's WAV stream does not begin with a header of 44 bytes")
    file.seek(0)
    file.write(_HEADER.pack(riff, size - 8, wave, fmt, head, data, size - _HEADER.size))
