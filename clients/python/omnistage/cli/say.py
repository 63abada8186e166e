"""`omnistage say`: text to an audio file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import BinaryIO

import click

from omnistage.calls import SHORT_TIMEOUT_S, SpeechOptions
from omnistage.cli.common import address_option, connect, one_line, stderr, timeout_option
from omnistage.cli.output import STDOUT, encoding_of, finish_wav, open_output
from omnistage.cli.progress import SpeechProgress
from omnistage.client import Client
from omnistage.encodings import ENCODINGS, STREAM_ENCODINGS, Encoding
from omnistage.speech import SpeechResult


@click.command()
@click.argument("text")
@click.option("-o", "--output", required=True, metavar="FILE", help='Audio file to write; "-" is standard output.')
@click.option("--format", "encoding", type=click.Choice(ENCODINGS), help="Audio format. [default: by FILE's suffix]")
@click.option("--stream", is_flag=True, help=f"Write audio while it is made ({', '.join(STREAM_ENCODINGS)}).")
@click.option("--voice", help="One of `omnistage voices`. [default: the first]")
@click.option("--model", help="Speech pipeline. [default: the server's]")
@click.option("--seed", type=int, help="The same seed gives the same audio. [default: drawn]")
@click.option("--max-frames", type=int, help="Most frames of 80 ms.")
@click.option("--cfg-alpha", type=float, help="Strength of guidance.")
@address_option
@timeout_option(None)
def say(  # noqa: PLR0913 - one for each option
    *,
    text: str,
    output: str,
    encoding: Encoding | None,
    stream: bool,
    voice: str | None,
    model: str | None,
    address: str,
    timeout_s: float | None,
    seed: int | None,
    max_frames: int | None,
    cfg_alpha: float | None,
) -> None:
    """Speak TEXT ("-": what comes from standard input) into a file.

    The file appears when it is complete: none is left, and one of that name stays as it was, if anything fails.
    """
    encoding = encoding or encoding_of(output)
    if stream and encoding not in STREAM_ENCODINGS:
        raise click.UsageError(f"{encoding} cannot be streamed; use one of {', '.join(STREAM_ENCODINGS)}")
    text = _read_stdin() if text == "-" else text
    with connect(address) as client, open_output(output) as file:
        if voice is None:
            voice, model = _first_voice(client, model, timeout_s)
        options = SpeechOptions(model=model, seed=seed, max_frames=max_frames, cfg_alpha=cfg_alpha)
        request = _Request(text, voice, encoding, timeout_s, options)
        speak = _stream if stream else _whole
        with SpeechProgress(stderr()) as progress:
            result = speak(client, request, file, progress)
    where = "standard output" if output == STDOUT else output
    click.echo(f"{where}: {_summary(result, progress, stream=stream)}", err=True)


@dataclass(frozen=True, slots=True)
class _Request:
    text: str
    voice: str
    encoding: Encoding
    timeout_s: float | None
    options: SpeechOptions


def _whole(client: Client, request: _Request, file: BinaryIO, progress: SpeechProgress) -> SpeechResult:
    """Write the clip when all of it is there."""
    clip = client.synthesize(
        request.text,
        voice=request.voice,
        encoding=request.encoding,
        timeout_s=request.timeout_s,
        **request.options,
    )
    progress.add(clip.duration_s)
    file.write(clip.audio)
    return clip.result


def _stream(client: Client, request: _Request, file: BinaryIO, progress: SpeechProgress) -> SpeechResult:
    """Write each chunk when it comes."""
    with client.stream(
        request.text,
        voice=request.voice,
        encoding=request.encoding,
        timeout_s=request.timeout_s,
        **request.options,
    ) as chunks:
        for chunk in chunks:
            progress.add(chunk.duration_s)
            file.write(chunk.audio)
            file.flush()  # whoever reads a pipe can play it now
        result = chunks.result
    if request.encoding == "wav":
        finish_wav(file)
    return result


def _first_voice(client: Client, model: str | None, timeout_s: float | None) -> tuple[str, str]:
    """Name and model of the first voice that the server offers."""
    voices = client.voices(model or "", timeout_s=SHORT_TIMEOUT_S if timeout_s is None else timeout_s)
    if not voices:
        raise click.ClickException("the server offers no voices")
    first = voices[0]
    click.echo(f"using voice {one_line(first.name)} of model {one_line(first.model)}; choose with --voice", err=True)
    return first.name, first.model


def _read_stdin() -> str:
    """Standard input without the line break at its end."""
    try:
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8: {error}") from error


def _summary(result: SpeechResult, progress: SpeechProgress, *, stream: bool) -> str:
    first = f", the first after {progress.first_audio_s:.2f} s" if stream else ""
    cut = "; cut off at the limit of frames" if result.stop_reason == "max_frames" else ""
    return one_line(
        f"{progress.audio_s:.2f} s of audio in {progress.elapsed_s:.2f} s{first}; voice {result.voice}, "
        f"model {result.model}, seed {result.seed}, {result.usage.frame_count} frames{cut}"
    )
