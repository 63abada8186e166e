"""The other commands of `omnistage`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import omnistage
from omnistage.cli import main
from stage_runtime.version import VERSION

Capture = pytest.CaptureFixture[str]
COMMAND = [sys.executable, "-c", "import sys; from omnistage.cli import main; sys.exit(main())"]


def test_version_is_printed(capsys: Capture) -> None:
    """`version` prints the version that is installed."""
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"omnistage {VERSION}\n"
    assert omnistage.__version__ == VERSION


def test_the_installed_command_runs() -> None:
    """The console script is `omnistage` and gives the exit codes of main()."""
    script = Path(sys.executable).with_name("omnistage")

    assert subprocess.run([script, "version"], capture_output=True, text=True, check=True).stdout.endswith(
        f"{VERSION}\n"
    )
    assert subprocess.run([script, "nope"], capture_output=True, check=False).returncode == 2


def test_without_a_command_help_is_shown(capsys: Capture) -> None:
    """Without arguments, and with --help, the commands are listed."""
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in ("say", "voices", "status", "health", "up", "version"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command"),
        (["voices", "--nope"], "No such option"),
        (["say", "Hi"], "Missing option"),
        (["say", "Hi", "-o", "o.wav", "--seed", "x"], "not a valid integer"),
        (["say", "Hi", "-o", "o.wav", "--timeout", "0"], "is not in the range"),
        (["voices", "--address", "localhost"], "none of host:port"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(capsys: Capture, arguments: list[str], message: str) -> None:
    """What is wrong with the arguments is told in one line that leads to the help."""
    assert main(arguments) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "--help')" in error
    assert error.count("\n") == 1


def test_voices_are_listed(server: Any, capsys: Capture) -> None:
    """`voices` lists name, model and languages, all or those of one pipeline."""
    assert main(["voices", "--address", server.address]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [["voice", "model", "languages"], ["amy", "speech", "en"], ["bob", "speech", "-"]]

    assert main(["voices", "--address", server.address, "--model", "other"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_voices_as_json(server: Any, capsys: Capture) -> None:
    """`voices --json` prints what programs need."""
    assert main(["voices", "--address", server.address, "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == [
        {"name": "amy", "model": "speech", "language_codes": ["en"]},
        {"name": "bob", "model": "speech", "language_codes": []},
    ]


def test_the_address_comes_from_the_environment(
    server: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch, free_port: Any
) -> None:
    """OMNISTAGE_ADDRESS is the default of --address, which wins over it."""
    monkeypatch.setenv("OMNISTAGE_ADDRESS", server.address)
    assert main(["voices"]) == 0

    assert main(["voices", "--address", f"127.0.0.1:{free_port()}"]) == 1
    assert capsys.readouterr().err.startswith("error: the server at 127.0.0.1:")


def test_status_shows_pipelines_stages_and_load(server: Any, capsys: Capture) -> None:
    """`status` shows every pipeline, stage and replica with state, reason, load and mean batch, cut nowhere."""
    assert main(["status", "--address", server.address]) == 0

    out = capsys.readouterr().out
    head, *lines = out.splitlines()
    assert head == f"omnistage 9.8.7 at {server.address}, up 1:01:40"
    rows = [" ".join(line.split()) for line in lines]
    assert "speech speech yes codec=codec-a (1 up) 3/64 4/256 1 CANCELLED, 12 OK" in rows
    assert "codec-a voxtral.codec [::1]:50063 up tiny 2/32 1 2.50 1.5 s 1" in rows
    assert any("127.0.0.1:50064 lost: connection [red]refused[/red] - 0/0 0 0.00 0.0 s 0" in row for row in rows)
    assert "codec-b voxtral.codec - no replica - - - - - -" in rows


def test_status_as_json(server: Any, capsys: Capture) -> None:
    """`status --json` has all that the server tells, with numbers as numbers."""
    assert main(["status", "--address", server.address, "--json"]) == 0

    status = json.loads(capsys.readouterr().out)
    assert status["server"] == {"version": "9.8.7", "uptime_s": 3700.0}
    assert status["pipelines"][0]["finished_counts"] == {"OK": 12, "CANCELLED": 1}
    replica = status["stages"][0]["replicas"][0]
    assert (replica["state"], replica["load"]["mean_batch_size"], replica["load"]["row_count"]) == ("up", 2.5, 25)


@pytest.mark.parametrize("text", ["line\nbreak", "bell\a", "\x1b[31mred"])
def test_texts_of_servers_cannot_steer_the_terminal(server: Any, capsys: Capture, text: str) -> None:
    """Control characters in names are replaced, so that tables stay tables."""
    server.voices[0].name = text

    main(["voices", "--address", server.address])

    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3
    assert "\x1b" not in out
    assert "\a" not in out


@pytest.mark.parametrize(
    ("service", "serving", "code", "text"),
    [
        ("", True, 0, "SERVING"),
        ("omnistage.v1.SpeechService", True, 0, "SERVING"),
        ("omnistage.v1.SpeechService", False, 4, "NOT_SERVING"),
        ("nope", True, 3, "no health of 'nope' is kept here"),
    ],
)
def test_health_has_the_exit_codes_of_grpc_health_probe(
    server: Any, capsys: Capture, service: str, serving: bool, code: int, text: str
) -> None:
    """0 if serving, 4 if not, 3 if the service is unknown; the state or the reason is printed."""
    if service != "nope":
        server.health.set(service, serving=serving)

    assert main(["health", server.address, *([service] if service else [])]) == code

    captured = capsys.readouterr()
    assert text in (captured.err if code else captured.out)


def test_health_without_a_server_is_2(free_port: Any, capsys: Capture) -> None:
    """A refused connection is told at once, with its reason."""
    assert main(["health", f"127.0.0.1:{free_port()}"]) == 2
    assert "refused" in capsys.readouterr().err


def test_health_of_something_that_does_not_speak_grpc_is_2(capsys: Capture) -> None:
    """A port that takes connections but never answers is no connection when the time is over."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        assert main(["health", address, "--timeout", "0.5"]) == 2

    assert capsys.readouterr().err == f"error: no connection to {address} within 0.5 s\n"


@pytest.mark.parametrize("failure", ["slow", "unavailable"])
def test_health_calls_that_fail_are_3(
    server: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """A server that was reached, but answers too late or with UNAVAILABLE, is a failed call and no failed connection."""

    async def check(request: Any, context: Any) -> None:
        import grpc  # noqa: PLC0415

        if failure == "slow":
            await asyncio.sleep(5)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    server.run(server.stop())
    monkeypatch.setattr(server.health, "Check", check)
    server.run(server.start())

    assert main(["health", server.address, "--timeout", "1"]) == 3
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("arguments", [[], ["localhost"], ["localhost:1", "a", "b"], ["localhost:1", "--nope"]])
def test_wrong_usage_of_health_is_1(capsys: Capture, arguments: list[str]) -> None:
    """Usage faults of the probe have the probe's code."""
    assert main(["health", *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_reader_that_goes_away_is_no_traceback(server: Any) -> None:
    """A table whose reader has closed the pipe ends quietly."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [*COMMAND, "status", "--address", server.address]
    result = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)

    assert (result.returncode, result.stderr) == (1, b"")
