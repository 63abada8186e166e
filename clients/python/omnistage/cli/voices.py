"""`omnistage voices`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click
from rich.table import Table

from omnistage.calls import SHORT_TIMEOUT_S
from omnistage.cli.common import address_option, connect, console, one_line, timeout_option


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--model", default="", help="Only voices of this pipeline.")
@address_option
@timeout_option(SHORT_TIMEOUT_S)
def voices(*, as_json: bool, model: str, address: str, timeout_s: float) -> None:
    """List the voices that can be named in requests."""
    with connect(address) as client:
        found = client.voices(model, timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps([asdict(voice) for voice in found], indent=2))
        return
    table = Table("voice", "model", "languages", box=None)
    for voice in found:
        table.add_row(one_line(voice.name), one_line(voice.model), one_line(", ".join(voice.language_codes)) or "-")
    console(sys.stdout).print(table)
