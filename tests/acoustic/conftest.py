"""Fixtures of the acoustic tests: golden vectors, the embedded model's head, and heads of random weights."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.acoustic.model import AcousticHead, AcousticWeights
from services.acoustic.model.weights import PREFIX
from services.voxtral.checkpoint import open_checkpoint
from services.voxtral.params import VoxtralParams, expected_tensors, parse_params

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "embedded" / "voxtral-golden"
GOLDEN = ROOT / "tests" / "golden" / "voxtral"

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums of several threads may round otherwise."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def inference() -> object:
    """As in the engine."""
    with torch.inference_mode():
        yield


@pytest.fixture
def model() -> Path:
    """Directory of the embedded golden model."""
    return MODEL


@pytest.fixture
def golden() -> Callable[[str], Tensors]:
    """Tensors of a golden file by its name."""
    return lambda name: load_file(GOLDEN / f"{name}.safetensors")


@pytest.fixture
def make_head() -> Callable[..., AcousticHead]:
    """The embedded model's head in a dtype."""

    def make(dtype: torch.dtype = torch.float32) -> AcousticHead:
        checkpoint = open_checkpoint(MODEL)
        weights = AcousticWeights.from_tensors(checkpoint.load(PREFIX, dtype), checkpoint.params)
        return AcousticHead.of(weights, checkpoint.params)

    return make


@pytest.fixture
def head(make_head: Callable[..., AcousticHead]) -> AcousticHead:
    """The embedded model's head in float32."""
    return make_head()


@pytest.fixture
def make_params() -> Callable[..., VoxtralParams]:
    """The embedded model's params with other acoustic_transformer_args."""

    def make(**changes: object) -> VoxtralParams:
        tree = copy.deepcopy(json.loads((MODEL / "params.json").read_text()))
        tree["multimodal"]["audio_model_args"]["acoustic_transformer_args"].update(changes)
        return parse_params(tree)

    return make


@pytest.fixture
def random_tensors() -> Callable[..., Tensors]:
    """Random acoustic tensors, named without prefix, for params."""

    def make(params: VoxtralParams, dtype: torch.dtype = torch.float32) -> Tensors:
        generator = torch.Generator().manual_seed(1)
        return {
            name.removeprefix(PREFIX): (torch.randn(shape, generator=generator) * 0.2).to(dtype)
            for name, shape in expected_tensors(params).items()
            if name.startswith(PREFIX)
        }

    return make


@pytest.fixture
def make_inputs() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Random rows of FrameInputs with guidance from 0 to 3; END_AUDIO is not allowed in every third row."""

    def make(head: AcousticHead, count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        dtype = head.weights.dtype
        return (
            torch.randn(count, head.params.acoustic.dim, generator=generator).to(dtype),
            (torch.rand(count, 1, generator=generator) * 3).to(dtype),
            torch.randn(count, head.params.acoustic_codebooks, generator=generator).to(dtype),
            torch.arange(count) % 3 > 0,
        )

    return make


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, object]]]:
    """A function that gives the events of our loggers since the last call, in order."""
    caplog.set_level(logging.INFO)

    def take() -> list[dict[str, object]]:
        taken = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
        caplog.clear()
        return taken

    return take
