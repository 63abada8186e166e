"""`omnistage say`: what it writes, and that it never leaves a file that looks complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from omnistage.cli import main
from stage_runtime.errors import QueueFull, StageReplicaLost, UnknownVoice

Say = Callable[..., int]


@pytest.fixture
def say(server: Any) -> Say:
    """A function that runs `omnistage say Hi` with options in this process and returns the exit code."""
    return lambda *options, text="Hi": main(["say", "--address", server.address, *options, "--", text])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("suffix", [".wav", ".pcm", ".f32", ".flac", ".opus", ".ogg", ".mp3", ".WAV"])
def test_the_format_comes_from_the_suffix(say: Say, server: Any, tmp_path: Path, suffix: str, stream: bool) -> None:
    """Each suffix gives a file of its format, whole and, where that can be, streamed."""
    path = tmp_path / f"out{suffix}"
    server.behaviour.chunk_count = 25
    can_stream = suffix.lower() in {".wav", ".pcm", ".f32"}

    code = say("-o", str(path), "--voice", "amy", *(["--stream"] if stream else []))

    assert code == (0 if can_stream or not stream else 2)
    if code:
        assert list(tmp_path.iterdir()) == []
        return
    if suffix in {".pcm", ".f32"}:
        samples = np.frombuffer(path.read_bytes(), "<i2" if suffix == ".pcm" else "<f4")
    else:
        samples, rate_hz = soundfile.read(path)
        assert rate_hz == 24_000
        assert soundfile.info(path).format == {".wav": "WAV", ".flac": "FLAC", ".mp3": "MP3"}.get(suffix.lower(), "OGG")
    assert abs(len(samples) - 48_000) < 0.06 * 24_000
    assert list(tmp_path.iterdir()) == [path]


def test_a_streamed_wav_file_has_its_lengths(say: Say, tmp_path: Path) -> None:
    """The header of a streamed WAV file is put right, so that the file equals the one that is not streamed."""
    say("-o", str(tmp_path / "a.wav"), "--voice", "amy", "--seed", "1", "--stream")
    say("-o", str(tmp_path / "b.wav"), "--voice", "amy", "--seed", "1")

    data = (tmp_path / "a.wav").read_bytes()
    assert data[:4] == b"RIFF"
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    assert int.from_bytes(data[40:44], "little") == len(data) - 44
    assert data == (tmp_path / "b.wav").read_bytes()


def test_the_format_option_wins_over_the_suffix(say: Say, tmp_path: Path) -> None:
    """--format decides, whatever the file is called."""
    assert say("-o", str(tmp_path / "out.xyz"), "--voice", "amy", "--format", "flac") == 0

    assert (tmp_path / "out.xyz").read_bytes().startswith(b"fLaC")


@pytest.mark.parametrize("name", ["out.aac", "out", "out.wav.bak"])
def test_an_unknown_suffix_is_refused_with_the_list(
    say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A suffix that tells no format is refused before anything is asked of the server."""
    assert say("-o", str(tmp_path / name), "--voice", "amy") == 2

    error = capsys.readouterr().err
    assert error.startswith("error: the suffix ")
    assert ".wav, .pcm, .f32, .flac, .opus, .ogg, .mp3" in error
    assert server.call_counts == {}


def test_options_reach_the_server(say: Say, server: Any, tmp_path: Path) -> None:
    """Every option of the request is sent as given, and those that are not given are left to the server."""
    out = str(tmp_path / "o.wav")
    say("-o", out, "--voice", "bob", "--seed", "-5", "--max-frames", "7", "--cfg-alpha", "2.5", "--model", "speech")
    say("-o", out, "--voice", "")

    first, second = server.inputs
    assert (first.text, first.voice, first.seed, first.max_frames) == ("Hi", "bob", -5, 7)
    assert (first.cfg_alpha, first.model) == (2.5, "speech")
    assert second.voice == ""
    assert not second.HasField("max_frames")
    assert not second.HasField("cfg_alpha")


def test_without_a_voice_the_first_one_is_used_and_named(
    say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --voice the first voice of the list is used, with its model, and standard error says so."""
    assert say("-o", str(tmp_path / "o.wav")) == 0

    assert (server.inputs[0].voice, server.inputs[0].model) == ("amy", "speech")
    assert "using voice amy of model speech; choose with --voice\n" in capsys.readouterr().err


def test_a_server_without_voices_is_an_error(
    say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --voice and without any voice the command fails and says why."""
    server.voices = []

    assert say("-o", str(tmp_path / "o.wav")) == 1
    assert capsys.readouterr().err == "error: the server offers no voices\n"


def test_a_summary_tells_what_was_made(
    say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error tells file, length, times, voice, model, seed and frames; a cut-off is told too."""
    path = tmp_path / "o.pcm"
    say("-o", str(path), "--voice", "amy", "--seed", "3", "--stream")

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{path}: 0.24 s of audio in ")
    assert "the first after " in captured.err
    assert captured.err.endswith("voice amy, model speech, seed 3, 3 frames\n")


@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["whole", "stream"])
def test_a_failure_leaves_no_file(
    say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """A failure, also after the first chunks, gives exit code 1, one line, and nothing in the folder."""
    server.behaviour.error = StageReplicaLost("codec", "127.0.0.1:9", "killed\nhard", retry_after_s=0.02)

    assert say("-o", str(tmp_path / "o.wav"), "--voice", "amy", *options) == 1

    assert list(tmp_path.iterdir()) == []
    error = capsys.readouterr().err
    assert error == ("error: replica 127.0.0.1:9 of stage 'codec' was lost (killed hard) (try again in 0.02 s)\n")


@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["whole", "stream"])
def test_a_failure_leaves_an_older_file_as_it_was(say: Say, server: Any, tmp_path: Path, options: list[str]) -> None:
    """A file of the same name stays untouched until the new one is complete."""
    path = tmp_path / "o.wav"
    path.write_bytes(b"older")
    server.behaviour.error = ValueError("bug")

    assert say("-o", str(path), "--voice", "amy", *options) == 1
    assert path.read_bytes() == b"older"
    server.behaviour.error = None
    assert say("-o", str(path), "--voice", "amy", *options) == 0

    assert path.read_bytes().startswith(b"RIFF")
    assert list(tmp_path.iterdir()) == [path]


def test_a_stream_that_lacks_its_end_leaves_no_file(say: Say, server: Any, tmp_path: Path) -> None:
    """A stream that ends with OK but without its final message is a failure."""
    server.behaviour.alter = lambda messages: messages[:-1]

    assert say("-o", str(tmp_path / "o.wav"), "--voice", "amy", "--stream") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_servers_message_is_shown(
    say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the server refuses is told in its own words, with the retry delay if it gives one."""
    server.behaviour.refusals = [UnknownVoice("eve", ["amy", "bob"]), QueueFull("speech", 8, retry_after_s=2)]

    assert say("-o", str(tmp_path / "o.wav"), "--voice", "eve") == 1
    assert capsys.readouterr().err == "error: voice 'eve' does not exist; valid voices: amy, bob\n"
    assert say("-o", str(tmp_path / "o.wav"), "--voice", "amy") == 1
    assert capsys.readouterr().err.endswith("(try again in 2 s)\n")


def test_a_timeout_ends_the_command(say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--timeout ends a command whose server does not answer."""
    server.behaviour.hang = True

    assert say("-o", str(tmp_path / "o.wav"), "--voice", "amy", "--timeout", "0.3") == 1

    assert capsys.readouterr().err.startswith("error: the deadline passed")
    assert list(tmp_path.iterdir()) == []
    assert server.cancelled.wait(5)


def test_a_folder_that_is_not_there_is_told_before_the_server_works(
    say: Say, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be made fails at once, with its reason, and no request is sent."""
    assert say("-o", str(tmp_path / "missing" / "o.wav"), "--voice", "amy") == 1

    assert capsys.readouterr().err.endswith("No such file or directory\n")
    assert server.call_counts == {}


def test_a_new_file_has_the_usual_permissions(say: Say, tmp_path: Path) -> None:
    """The file can be read by whom the umask allows."""
    previous = os.umask(0o027)
    try:
        say("-o", str(tmp_path / "o.wav"), "--voice", "amy")
    finally:
        os.umask(previous)

    assert (tmp_path / "o.wav").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["whole", "stream"])
def test_a_pipe_is_written_to_and_not_replaced(say: Say, tmp_path: Path, options: list[str]) -> None:
    """A named pipe stays a pipe; its reader gets the audio."""
    path = tmp_path / "pipe.wav"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()

    assert say("-o", str(path), "--voice", "amy", *options) == 0

    reader.join(10)
    assert read[0].startswith(b"RIFF")
    assert len(read[0]) == 44 + 2 * 5760
    assert path.is_fifo()


def test_a_symbolic_link_stays_one(say: Say, tmp_path: Path) -> None:
    """Writing to a link replaces what it leads to."""
    (tmp_path / "real.wav").write_bytes(b"older")
    (tmp_path / "link.wav").symlink_to("real.wav")

    say("-o", str(tmp_path / "link.wav"), "--voice", "amy")

    assert (tmp_path / "link.wav").is_symlink()
    assert (tmp_path / "real.wav").read_bytes().startswith(b"RIFF")


def test_no_server_is_told_in_one_line(tmp_path: Path, free_port: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is not there gives exit code 1 and one line with address and remedy."""
    address = f"127.0.0.1:{free_port()}"

    assert main(["say", "Hi", "-o", str(tmp_path / "o.wav"), "--address", address]) == 1

    error = capsys.readouterr().err
    assert error.startswith(f"error: the server at {address} cannot be reached")
    assert (error.count("\n"), list(tmp_path.iterdir())) == (1, [])
