"""benchmarks/common.py, which every benchmark reports with."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from pathlib import Path

import pytest

from benchmarks import common


def test_report_writes_and_prints_the_same_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file NAME.json and the printed text hold the figures, ratios, machine and versions that were returned."""
    result = common.report("lane", {"step_p50_ms": 1.25}, {"over_bare_grpc": 1.1}, out=tmp_path / "new")

    written = json.loads((tmp_path / "new" / "lane.json").read_text())
    assert written == json.loads(capsys.readouterr().out) == result
    assert written["name"] == "lane"
    assert written["figures"] == {"step_p50_ms": 1.25}
    assert written["ratios"] == {"over_bare_grpc": 1.1}


def test_report_tells_machine_and_versions(tmp_path: Path) -> None:
    """A report says on what processor, system and memory it was measured, under which load, and with which versions."""
    result = common.report("lane", {"step_p50_ms": 1.25}, out=tmp_path)

    machine = result["machine"]
    assert machine["cpu"]
    assert machine["os"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**20
    assert machine["load_average"] >= 0
    assert result["versions"]["python"] == platform.python_version()
    for name in ("omnistage", "grpcio", "protobuf", "torch"):
        assert result["versions"][name] == importlib.metadata.version(name)


def test_versions_leave_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that is not installed has no version in the report."""
    monkeypatch.setattr(common, "DISTRIBUTIONS", ("omnistage", "no-such-distribution"))

    assert set(common.versions()) == {"python", "omnistage"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_report_refuses_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """A figure or ratio that is NaN or infinite is an error that names it, and nothing is written."""
    with pytest.raises(ValueError, match="step_p50_ms"):
        common.report("lane", {"step_p50_ms": value}, out=tmp_path)
    with pytest.raises(ValueError, match="over_bare_grpc"):
        common.report("lane", {"step_p50_ms": 1.0}, {"over_bare_grpc": value}, out=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_report_refuses_to_be_empty(tmp_path: Path) -> None:
    """A benchmark without any figure is an error."""
    with pytest.raises(ValueError, match="no figures"):
        common.report("lane", {}, out=tmp_path)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (25, 2), (50, 3), (90, 4.6), (100, 5)])
def test_percentiles_are_interpolated(percent: float, expected: float) -> None:
    """Percentiles of 1 to 5 lie on the line through the sorted samples, whatever their order."""
    assert common.percentile([3, 1, 5, 2, 4], percent) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 100.1)])
def test_percentiles_out_of_range_are_refused(samples: list[float], percent: float) -> None:
    """No samples, or a percentage below 0 or above 100, is an error."""
    with pytest.raises(ValueError, match="percent"):
        common.percentile(samples, percent)


def test_summary_is_in_milliseconds() -> None:
    """Times in seconds become best, median, 90th and 99th percentile in milliseconds, and a count."""
    figures = common.summary("step", [0.003, 0.001, 0.002])

    assert figures == pytest.approx(
        {"step_best_ms": 1, "step_p50_ms": 2, "step_p90_ms": 2.8, "step_p99_ms": 2.98, "step_count": 3}
    )
