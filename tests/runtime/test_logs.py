"""stage_runtime.logs: form, fields, levels, and what must not appear."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import grpc
import numpy as np
import pytest

from omnistage.v1 import speech_pb2
from stage_runtime import logs
from stage_runtime.config import LogSettings

SECRET = "a prompt that nobody may see"


def entries(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_json_is_one_object_a_line_with_all_fields(configure_logs) -> None:
    """Event, fields, level, logger, process, time and request id; non-ASCII stays readable."""
    stream = configure_logs(LogSettings(format="json"))

    with logs.bound_request("r-1"):
        logs.get_logger("stage_runtime.test").warning("replica_lost", stage="codec", reason="Größe", count=np.int64(3))

    (entry,) = entries(stream)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "event": "replica_lost",
        "stage": "codec",
        "reason": "Größe",
        "count": 3,
        "level": "warning",
        "logger": "stage_runtime.test",
        "process": "test",
        "request_id": "r-1",
    }
    assert "Größe" in stream.getvalue()


def test_console_has_the_same_fields(log) -> None:
    """One line for people."""
    logs.get_logger("stage_runtime.test").info("serving", addresses=["a:1"])

    line = log.getvalue()
    assert line.count("\n") == 1
    for part in ("serving", "addresses=['a:1']", "process=test", "stage_runtime.test"):
        assert part in line


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_only_the_level_and_above_is_written(configure_logs, level: str) -> None:
    """Of four events, those at or above the setting."""
    stream = configure_logs(LogSettings(format="json", level=level))
    log = logs.get_logger("stage_runtime.test")

    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)(name)

    names = ["debug", "info", "warning", "error"]
    assert [entry["event"] for entry in entries(stream)] == names[names.index(level) :]


async def test_the_request_id_follows_tasks_and_stays_among_them(configure_logs) -> None:
    """Tasks inherit the id of the task that made them; what one sets, others do not see."""
    stream = configure_logs(LogSettings(format="json"))
    log = logs.get_logger("stage_runtime.test")

    async def work(identifier):
        logs.request_id.set(identifier)
        await asyncio.sleep(0)
        async with asyncio.TaskGroup() as group:
            group.create_task(inner())

    async def inner():
        log.info("inner")

    await asyncio.gather(work("r-1"), work("r-2"))
    log.info("outer")

    assert [entry.get("request_id") for entry in entries(stream)] == ["r-1", "r-2", None]


def test_libraries_and_warnings_are_seen_in_the_same_form(configure_logs) -> None:
    """Loggers of asyncio and grpc, and Python's warnings, become entries with the process and the request."""
    stream = configure_logs(LogSettings(format="json"))

    with logs.bound_request("r-1"), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.getLogger("asyncio").warning("slow %s", "callback")
        logging.getLogger("grpc._cython.cygrpc").error("trouble")
        logging.getLogger("asyncio").info("of no interest")
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    found = entries(stream)
    assert [entry["event"].splitlines()[0].rpartition(": ")[2] for entry in found] == [
        "slow callback",
        "trouble",
        "old",
    ]
    assert [entry["logger"] for entry in found] == ["asyncio", "grpc._cython.cygrpc", "py.warnings"]
    assert all((entry["process"], entry["request_id"]) == ("test", "r-1") for entry in found)


@pytest.mark.parametrize("style", ["console", "json"])
def test_tracebacks_have_no_local_variables(configure_logs, style: str) -> None:
    """An exception is logged with its traceback, but prompts in variables do not appear."""
    stream = configure_logs(LogSettings(format=style))

    def fail(prompt):
        return {}[len(prompt)]

    try:
        fail(SECRET)
    except KeyError:
        logs.get_logger("stage_runtime.test").exception("failed")

    assert "Traceback" in stream.getvalue()
    assert "KeyError" in stream.getvalue()
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"\0" * 48_000, "<48000 bytes>"),
        (np.zeros(5), "<numpy.ndarray>"),
        (speech_pb2.SpeechInput(text=SECRET), "<omnistage.v1.speech_pb2.SpeechInput>"),
        ({"pcm": b"123"}, {"pcm": "<3 bytes>"}),
        ([b"1", 2], ["<1 bytes>", 2]),
        (grpc.StatusCode.OK, "OK"),
        (Path("/a/b"), "/a/b"),
        (ValueError("x"), "ValueError: x"),
        (np.float32(0.5), 0.5),
        (True, True),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_content_is_never_shown(configure_logs, value: object, shown: object) -> None:
    """Bytes, arrays and messages appear by type and size; plain values as they are."""
    stream = configure_logs(LogSettings(format="json"))

    logs.get_logger("stage_runtime.test").info("event", value=value)

    assert entries(stream)[0]["value"] == shown


def test_long_texts_are_cut(configure_logs) -> None:
    """A field of a megabyte does not fill the log."""
    stream = configure_logs(LogSettings(format="json"))

    logs.get_logger("stage_runtime.test").info("event", value="x" * 2**20)

    assert len(stream.getvalue()) < 1000


def test_logs_go_to_stderr_once_even_if_configured_twice() -> None:
    """Standard output stays clean, and a second call replaces the first."""
    program = (
        "from stage_runtime import logs; from stage_runtime.config import LogSettings\n"
        "log = logs.get_logger('stage_runtime.test')\n"
        "logs.configure(LogSettings(format='json'), process='one'); logs.configure(LogSettings(format='json'), process='two')\n"
        "log.info('event')"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout == ""
    assert [json.loads(line)["process"] for line in result.stderr.splitlines()] == ["two"]


def test_unconfigured_logs_leave_stdout_alone() -> None:
    """Inside a foreign program that did not configure logs, warnings go to stderr and infos nowhere."""
    program = (
        "from stage_runtime import logs\n"
        "logs.get_logger('stage_runtime.test').info('quiet'); logs.get_logger('stage_runtime.test').warning('loud')"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout == ""
    assert "loud" in result.stderr
    assert "quiet" not in result.stderr
