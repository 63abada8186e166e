"""`omnistage say` as a process: standard input and output, terminals, Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import soundfile

COMMAND = [sys.executable, "-c", "import sys; from omnistage.cli import main; sys.exit(main())"]


@pytest.mark.parametrize("options", [[], ["--stream"], ["--format", "pcm"], ["--format", "flac"]])
def test_standard_output_gets_the_audio_and_nothing_else(server: Any, options: list[str]) -> None:
    """With "-o -" the audio goes to standard output, as WAV if no format is given, and messages to standard error."""
    command = [*COMMAND, "say", "Hi", "-o", "-", "--voice", "amy", "--address", server.address, *options]
    result = subprocess.run(command, capture_output=True, check=True)

    assert b"standard output: 0.24 s of audio" in result.stderr
    if "pcm" in options:
        assert len(result.stdout) == 2 * 5760
    elif "flac" in options:
        assert len(soundfile.read(io.BytesIO(result.stdout))[0]) == 5760
    else:
        assert (result.stdout[:4], len(result.stdout)) == (b"RIFF", 44 + 2 * 5760)


def test_audio_is_not_written_to_a_terminal(server: Any) -> None:
    """With "-o -" and a terminal as standard output the command refuses before it calls."""
    ours, terminal = pty.openpty()
    command = [*COMMAND, "say", "Hi", "-o", "-", "--voice", "amy", "--address", server.address]
    result = subprocess.run(command, stdout=terminal, stderr=subprocess.PIPE, text=True, check=False)
    os.close(terminal)
    os.close(ours)

    assert (result.returncode, server.call_counts) == (2, {})
    assert result.stderr.startswith("error: audio is not written to a terminal")


def test_a_terminal_shows_progress(server: Any, tmp_path: Path) -> None:
    """On a terminal audio made, time passed and the first audio's delay are shown while the stream goes on."""
    server.behaviour.chunk_s = 0.3
    ours, terminal = pty.openpty()
    command = [*COMMAND, "say", "Hi", "-o", "o.wav", "--stream", "--voice", "amy", "--address", server.address]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stderr=terminal, cwd=tmp_path, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end was closed
            break
    os.close(ours)

    assert process.wait(10) == 0
    assert b"waiting for the server" in shown
    assert b"0.16 s of audio, the first after 0." in shown


@pytest.mark.parametrize("data", ["Grüße\n".encode(), "Grüße\r\n".encode(), "Grüße".encode()])
def test_text_is_read_from_standard_input(server: Any, tmp_path: Path, data: bytes) -> None:
    """With the text "-" standard input is spoken, without the line break at its end."""
    command = [*COMMAND, "say", "-", "-o", "o.wav", "--voice", "amy"]
    environment = os.environ | {"OMNISTAGE_ADDRESS": server.address}
    subprocess.run(command, input=data, cwd=tmp_path, env=environment, capture_output=True, check=True)

    assert server.inputs[0].text == "Grüße"


def test_input_that_is_no_text_is_refused(server: Any, tmp_path: Path) -> None:
    """Standard input and arguments that are not UTF-8 are refused with one line, and nothing is sent."""
    end = ["-o", "o.wav", "--voice", "amy", "--address", server.address]
    by_input = subprocess.run(
        [*COMMAND, "say", "-", *end], input=b"\xff", cwd=tmp_path, capture_output=True, check=False
    )
    by_argument = subprocess.run([*COMMAND, "say", b"\xff", *end], cwd=tmp_path, capture_output=True, check=False)

    assert by_input.stderr.startswith(b"error: standard input is not UTF-8")
    assert by_argument.stderr.startswith(b"error: input.text: cannot be sent")
    assert (by_input.returncode, by_argument.returncode) == (2, 1)
    assert server.call_counts == {}


@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["whole", "stream"])
def test_ctrl_c_cancels_the_call(server: Any, tmp_path: Path, options: list[str]) -> None:
    """SIGINT ends the command with 130 and no file, and the call in the server is cancelled."""
    server.behaviour.hang = True
    command = [*COMMAND, "say", "Hi", "-o", "o.wav", "--voice", "amy", "--address", server.address, *options]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not server.call_counts:
        assert time.monotonic() < deadline
        time.sleep(0.02)

    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)

    assert process.returncode == 130
    assert "Traceback" not in error
    assert server.cancelled.wait(5)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_ends_the_command_quietly(server: Any) -> None:
    """When the reader of standard output closes it the command stops, without a traceback, and cancels the call."""
    server.behaviour.chunk_count = 200
    server.behaviour.chunk_s = 0.05
    command = [*COMMAND, "say", "Hi", "-o", "-", "--stream", "--voice", "amy", "--address", server.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None

    process.stdout.read(100)
    process.stdout.close()

    assert process.wait(10) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
    assert server.cancelled.wait(5)
