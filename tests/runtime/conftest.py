"""Processes for the tests of stage_runtime."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stage_runtime import logs
from stage_runtime.config import LogSettings

PROGRAMS = Path(__file__).parent / "programs"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What this process logs from level info on."""
    with configured_logs(LogSettings()) as stream:
        yield stream


@pytest.fixture
def configure_logs() -> Iterator[Callable[[LogSettings], io.StringIO]]:
    """A function that configures the logs of this process and returns where they go."""
    with contextlib.ExitStack() as stack:
        yield lambda settings: stack.enter_context(configured_logs(settings))


@contextlib.contextmanager
def configured_logs(settings: LogSettings) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    logs.configure(settings, process="test", stream=stream)
    try:
        yield stream
    finally:
        logging.captureWarnings(capture=False)
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a program of tests/runtime/programs with arguments; killed after the test if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start_program(name: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAMS / name), *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start_program
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture
def serve(start: Start) -> Callable[..., tuple[subprocess.Popen[str], list[str]]]:
    """A function that starts programs/serve.py and returns the process and its addresses, once it listens."""

    def serve_at(*listen: object) -> tuple[subprocess.Popen[str], list[str]]:
        process = start("serve.py", *listen)
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return process, json.loads(line)["addresses"]

    return serve_at
