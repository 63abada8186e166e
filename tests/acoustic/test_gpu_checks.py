"""benchmarks/gpu_checks.py keeps working where there is no CUDA device: its portable checks, and its answer."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_checks
from services.acoustic.graphs import HostCapture


@pytest.mark.parametrize("check", gpu_checks.PORTABLE, ids=lambda check: check.__name__)
def test_portable_checks_pass_on_a_cpu(check: gpu_checks.Check) -> None:
    """Every check that needs no CUDA passes with the CPU's capture back end."""
    target = gpu_checks.Target(torch.device("cpu"), HostCapture)

    outcome = check(target)

    assert outcome.passed, outcome.detail


def test_replay_check_notices_eager_calls() -> None:
    """A back end that never replays fails the check of the replays."""
    target = gpu_checks.Target(torch.device("cpu"), lambda: HostCapture(lambda: True))

    assert not gpu_checks.check_replays(target).passed


def test_without_cuda_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a device it says so and ends with code 3."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert gpu_checks.main() == 3
    assert "no CUDA device" in capsys.readouterr().out
