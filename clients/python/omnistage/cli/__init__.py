"""The command `omnistage`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from omnistage.cli.common import one_line
from omnistage.cli.health import health
from omnistage.cli.say import say
from omnistage.cli.status import status
from omnistage.cli.up import up
from omnistage.cli.version import version
from omnistage.cli.voices import voices
from stage_runtime.errors import OmnistageError

__all__ = ["group", "main"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def group(context: click.Context) -> None:
    """Omnistage: run the server, and use one."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (say, voices, status, health, up, version):
    group.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Errors take one line on standard error and give 1, wrong usage gives 2 (1 in `health`, as its codes are those of
    grpc_health_probe), Ctrl-C 130.
    """
    try:
        code = group.main(arguments, prog_name="omnistage", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        _complain(error.format_message(), f"see '{error.ctx.command_path} --help'" if error.ctx else "")
        return EXIT_FAILED if error.ctx and error.ctx.command is health else EXIT_USAGE
    except click.ClickException as error:
        _complain(error.format_message())
    except OmnistageError as error:
        _complain(error.message, "" if error.retry_after_s is None else f"try again in {error.retry_after_s:g} s")
    except BrokenPipeError:
        # Whoever read standard output wants no more. Python would complain when it flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except click.Abort:
        return EXIT_INTERRUPTED
    else:
        return code if isinstance(code, int) else 0
    return EXIT_FAILED


def _complain(message: str, hint: str = "") -> None:
    click.echo(f"error: {one_line(message)}{f' ({hint})' if hint else ''}", err=True)
