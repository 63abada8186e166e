"""The examples of the client's and the command line's pages do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.errors import UnknownVoice

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", (REFERENCE / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found


@pytest.mark.parametrize("number", range(len(blocks("client.md", "python"))))
def test_examples_of_the_client_run(server: Any, tmp_path: Path, number: int) -> None:
    """Each Python example runs by itself, warnings being errors, and prints something."""
    script = blocks("client.md", "python")[number].replace("localhost:50051", server.address)
    if "nobody" in script:
        server.behaviour.refusals = [UnknownVoice("nobody", ["amy", "bob"])]
    command = [sys.executable, "-W", "error", "-c", script]

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_examples_of_the_command_line_run(server: Any, tmp_path: Path) -> None:
    """Every command succeeds, and the files that are named are there."""
    script = "\n".join(["set -e", *blocks("cli.md", "sh")]).replace("localhost:50051", server.address)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMNISTAGE_ADDRESS": server.address}
    server.health.set("omnistage.v1.SpeechService", serving=True)

    result = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hello.wav", "hello.opus", "hello.pcm", "minus.flac"}
