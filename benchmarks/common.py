"""What every benchmark shares: percentiles, facts about machine and versions, and one JSON report.

A benchmark measures, then calls `report` once. It measures nothing itself and knows nothing of what is measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

import psutil

OUT = Path(__file__).resolve().parents[1] / "out" / "bench"
DISTRIBUTIONS = ("omnistage", "grpcio", "protobuf", "numpy", "torch")


class Machine(TypedDict):
    """Where a benchmark ran. `load_average` is that of the last minute, before the report was written."""

    cpu: str
    cores: int
    load_average: float
    memory_bytes: int
    os: str


class Report(TypedDict):
    """Result of one benchmark. Names of figures end in their unit; ratios compare two figures of the same run."""

    name: str
    finished_at: str
    figures: Mapping[str, float]
    ratios: Mapping[str, float]
    machine: Machine
    versions: Mapping[str, str]


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of the samples lie, interpolated linearly between the nearest two.

    Raises ValueError if there are no samples or `percent` is out of range.
    """
    if not samples:
        raise ValueError("a percentile needs at least one sample")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it must be 0 to 100")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(name: str, samples_s: Sequence[float]) -> dict[str, float]:
    """Figures of a series of times in seconds, in milliseconds: best, median, 90th and 99th percentile, and their number."""
    points = {"best": 0.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    figures = {f"{name}_{point}_ms": percentile(samples_s, percent) * 1e3 for point, percent in points.items()}
    return {**figures, f"{name}_count": float(len(samples_s))}


def machine() -> Machine:
    """Facts about this machine, as of now."""
    return Machine(
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        load_average=psutil.getloadavg()[0],
        memory_bytes=psutil.virtual_memory().total,
        os=platform.platform(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the distributions that matter and are installed."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def report(
    name: str, figures: Mapping[str, float], ratios: Mapping[str, float] | None = None, *, out: Path = OUT
) -> Report:
    """Write the result to `out`/NAME.json, print it, and return it.

    Raises ValueError, and writes nothing, if there is no figure or if a figure or ratio is not finite: such a benchmark failed.
    """
    if not figures:
        raise ValueError(f"benchmark {name!r} reports no figures")
    if bad := {key: value for key, value in {**figures, **(ratios or {})}.items() if not math.isfinite(value)}:
        raise ValueError(f"benchmark {name!r} reports values that are not finite: {bad}")
    result = Report(
        name=name,
        finished_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        figures=dict(figures),
        ratios=dict(ratios or {}),
        machine=machine(),
        versions=versions(),
    )
    text = json.dumps(result, indent=2)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(text + "\n")
    print(text)
    return result


def _cpu_model() -> str:
    """Name of the processor. platform.processor() is empty or just an architecture on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in {"model name", "Model"}:
                return value.strip()
    return platform.processor() or platform.machine()
