"""Structured logs on stderr: events with fields, each with the id of the request it belongs to.

Loggers of this project and of libraries (asyncio, grpc, Python warnings) go through the standard library's root logger to one
handler, which `configure` installs. Importing this module configures nothing, so that it may be used inside a foreign program.

A log never holds what requests carry: bytes, arrays and protobuf messages are shown by type and size only, long texts are cut,
and tracebacks have no local variables. Texts of exceptions are shown: they must not quote prompts.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor

from stage_runtime.config import LogSettings

MAX_TEXT_CHARACTERS = 400
MAX_ITEMS = 50
# Not cut: they are made by us, and a traceback without its end is useless.
_WHOLE = {"event", "exception", "stack"}

request_id: ContextVar[str] = ContextVar("omnistage_request_id", default="")
"""Id of the request that the running task works on; "" outside of requests. Handlers set it as soon as they know it."""


@contextlib.contextmanager
def bound_request(identifier: str) -> Iterator[None]:
    """Set `request_id` for the body, and put the former one back."""
    token = request_id.set(identifier)
    try:
        yield
    finally:
        request_id.reset(token)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger for events with fields: `get_logger(__name__).info("replica_lost", stage=..., replica=...)`."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def configure(settings: LogSettings, *, process: str, stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream` (None: stderr), as `settings` say; `process` is a field of every event.

    Calling it again replaces the earlier handler.
    """
    stream = sys.stderr if stream is None else stream

    def add_process(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, add_process]
    if settings.format == "json":
        final += [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]
    else:
        final.append(
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(),
                # rich's tracebacks would show local variables, and with them prompts
                exception_formatter=structlog.dev.plain_traceback,
            )
        )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_shared(), processors=final))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(settings.level.upper())
    # On these levels the loggers of libraries tell of their own work, not of ours.
    for name in ("asyncio", "grpc", "grpc._cython.cygrpc"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        _add_request,
        _hide_content,
    ]


def _add_request(_logger: Any, _method: str, event: EventDict) -> EventDict:
    identifier = request_id.get()
    if identifier:
        event.setdefault("request_id", identifier)
    return event


def _hide_content(_logger: Any, _method: str, event: EventDict) -> EventDict:
    shown: MutableMapping[str, Any] = {}
    for key, value in event.items():
        shown[key] = value if key in _WHOLE or key.startswith("_") or key == "exc_info" else _show(value)
    return shown


def _show(value: Any) -> Any:
    """The value if it is plain and short, else what kind of thing it is."""
    for types, show in _SHOWN:
        if isinstance(value, types):
            return show(value)
    return f"<{type(value).__module__}.{type(value).__name__}>"


def _cut(text: str) -> str:
    hidden = len(text) - MAX_TEXT_CHARACTERS
    return text if hidden <= 0 else f"{text[:MAX_TEXT_CHARACTERS]}… ({hidden} more characters)"


# The first match counts.
_SHOWN: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (str, _cut),
    ((bool, type(None)), lambda value: value),
    (enum.Enum, lambda value: value.name),
    (numbers.Integral, int),
    (numbers.Real, float),
    ((bytes, bytearray, memoryview), lambda value: f"<{len(value)} bytes>"),
    (Mapping, lambda value: {_cut(str(key)): _show(each) for key, each in list(value.items())[:MAX_ITEMS]}),
    ((list, tuple, set, frozenset), lambda value: [_show(each) for each in list(value)[:MAX_ITEMS]]),
    (BaseException, lambda value: _cut(f"{type(value).__name__}: {value}")),
    (PurePath, lambda value: _cut(str(value))),
)
