"""What several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, Any, TypeVar

import click
from rich.console import Console

from omnistage.client import Client
from omnistage.connection import DEFAULT_ADDRESS

F = TypeVar("F", bound=Callable[..., Any])

# Wide enough that nothing of a table is cut when it goes into a file or another program.
_WIDE_COLUMNS = 240


def address_option(command: F) -> F:
    """The option --address."""
    return click.option(
        "--address",
        envvar="OMNISTAGE_ADDRESS",
        default=DEFAULT_ADDRESS,
        show_default=True,
        show_envvar=True,
        help="Server: host:port, unix:/path or dns:///name:port.",
    )(command)


def timeout_option(default_s: float | None) -> Callable[[F], F]:
    """The option --timeout, named timeout_s."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=default_s,
        show_default=default_s is not None,
        metavar="SECONDS",
        help="Give up after this time." + ("" if default_s is not None else " [default: never]"),
    )


def connect(address: str) -> Client:
    """A client for an address that a user gave."""
    try:
        return Client(address)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def console(file: IO[str]) -> Console:
    """A console that shows texts as they are. Names and messages of servers are no markup."""
    width = None if file.isatty() else _WIDE_COLUMNS
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


def stderr() -> Console:
    """The console for messages and progress."""
    return console(sys.stderr)


def one_line(text: str) -> str:
    """The text without line breaks, and without characters that could steer a terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))
