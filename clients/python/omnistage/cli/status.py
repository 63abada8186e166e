"""`omnistage status`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import click
from rich.table import Table

from omnistage.calls import SHORT_TIMEOUT_S
from omnistage.cli.common import address_option, connect, console, one_line, timeout_option
from omnistage.system import Pipeline, Replica, Server, Stage


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@address_option
@timeout_option(SHORT_TIMEOUT_S)
def status(*, as_json: bool, address: str, timeout_s: float) -> None:
    """Show pipelines, stages, their replicas and load."""
    with connect(address) as client:
        server = client.server(timeout_s=timeout_s)
        pipelines = client.pipelines(timeout_s=timeout_s)
        stages = client.stages(timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps(_as_json(server, pipelines, stages), indent=2))
        return
    out = console(sys.stdout)
    uptime = timedelta(seconds=round(server.uptime_s))
    out.print(f"omnistage {one_line(server.version)} at {address}, up {uptime}")
    out.print()
    out.print(_pipeline_table(pipelines))
    out.print()
    out.print(_stage_table(stages))


def _as_json(server: Server, pipelines: list[Pipeline], stages: list[Stage]) -> dict[str, Any]:
    return {
        "server": asdict(server),
        "pipelines": [asdict(pipeline) for pipeline in pipelines],
        "stages": [
            asdict(stage)
            | {
                "replicas": [
                    asdict(replica) | {"load": asdict(replica.load) | {"mean_batch_size": replica.load.mean_batch_size}}
                    for replica in stage.replicas
                ]
            }
            for stage in stages
        ],
    }


def _pipeline_table(pipelines: list[Pipeline]) -> Table:
    table = Table("pipeline", "kind", "serving", "stages", "in flight", "queued", "finished", box=None)
    for pipeline in pipelines:
        stages = ", ".join(f"{stage.role}={stage.stage} ({stage.up_count} up)" for stage in pipeline.stages)
        limits = pipeline.limits
        finished = ", ".join(f"{count} {code}" for code, count in sorted(pipeline.finished_counts.items()))
        table.add_row(
            one_line(pipeline.name),
            one_line(pipeline.kind),
            "yes" if pipeline.serving else "no",
            one_line(stages),
            f"{pipeline.in_flight_count}/{limits.max_concurrent_count}",
            f"{pipeline.queued_count}/{limits.max_queued_count}",
            one_line(finished) or "-",
        )
    return table


def _stage_table(stages: list[Stage]) -> Table:
    table = Table(
        "stage", "kind", "replica", "state", "model", "active", "queued", "mean batch", "busy", "lost", box=None
    )
    for stage in stages:
        for replica in stage.replicas:
            table.add_row(one_line(stage.name), one_line(stage.kind), *_replica_cells(replica))
        if not stage.replicas:
            table.add_row(one_line(stage.name), one_line(stage.kind), "-", "no replica", *["-"] * 6)
    return table


def _replica_cells(replica: Replica) -> list[str]:
    load = replica.load
    return [
        one_line(replica.address),
        one_line(f"{replica.state}: {replica.reason}" if replica.reason else replica.state),
        one_line(replica.model) or "-",
        f"{load.active_count}/{load.capacity_count}",
        str(load.queued_count),
        f"{load.mean_batch_size:.2f}",
        f"{load.busy_s:.1f} s",
        str(replica.lost_count),
    ]
