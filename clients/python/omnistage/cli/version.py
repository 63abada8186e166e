"""`omnistage version`."""

from __future__ import annotations

import click

from stage_runtime.version import VERSION


@click.command()
def version() -> None:
    """Print the version of this installation."""
    click.echo(f"omnistage {VERSION}")
