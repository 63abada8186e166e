"""Fixtures of the codec tests: golden vectors, the embedded model's decoder and engine, and a driver of the engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnistage.stage.v1 import stage_pb2
from services.codec.engine import CodecEngine, CodecRequest, create_engine
from services.codec.model import PREFIX, CodecDecoder, CodecWeights
from services.voxtral.checkpoint import open_checkpoint
from services.voxtral.params import VoxtralParams, expected_tensors, parse_params
from stage_runtime.config import StageSettings
from stage_runtime.engine import Next, StageRequest, StepResult, Work
from stage_runtime.tensors import Rows, rows_from_numpy

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "embedded" / "voxtral-golden"
GOLDEN = ROOT / "tests" / "golden" / "voxtral"

SAMPLES_PER_FRAME = 1920

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums of several threads may round otherwise."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
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
def make_decoder() -> Callable[..., CodecDecoder]:
    """The embedded model's decoder in a dtype."""

    def make(dtype: torch.dtype = torch.float32) -> CodecDecoder:
        checkpoint = open_checkpoint(MODEL)
        weights = CodecWeights.from_tensors(checkpoint.load(PREFIX, torch.float32), checkpoint.params, dtype)
        return CodecDecoder.of(weights, checkpoint.params.codec)

    return make


@pytest.fixture
def decoder(make_decoder: Callable[..., CodecDecoder]) -> CodecDecoder:
    """The embedded model's decoder in float32."""
    return make_decoder()


@pytest.fixture
def make_params() -> Callable[..., VoxtralParams]:
    """The embedded model's params with other audio_tokenizer_args."""

    def make(**changes: object) -> VoxtralParams:
        tree = copy.deepcopy(json.loads((MODEL / "params.json").read_text()))
        tree["multimodal"]["audio_tokenizer_args"].update(changes)
        return parse_params(tree)

    return make


@pytest.fixture
def random_tensors() -> Callable[..., Tensors]:
    """Random codec tensors, named without prefix, for params; norms, scales and usage positive."""

    def make(params: VoxtralParams) -> Tensors:
        generator = torch.Generator().manual_seed(1)
        tensors = {}
        for name, shape in expected_tensors(params).items():
            if name.startswith(PREFIX):
                values = torch.randn(shape, generator=generator)
                positive = len(shape) == 1 or name.endswith("original0")
                tensors[name.removeprefix(PREFIX)] = values.abs() + 0.5 if positive else values * 0.3
        return tensors

    return make


@pytest.fixture
def random_codes() -> Callable[..., torch.Tensor]:
    """Random real codes (T, 7) int64 of the golden model, with the shift of 2."""

    def make(frames: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        semantic = torch.randint(2, 96, (frames, 1), generator=generator)
        return torch.cat([semantic, torch.randint(2, 23, (frames, 6), generator=generator)], dim=1)

    return make


@dataclass(eq=False)
class Stream:
    """A request that the driver admitted, and its samples so far."""

    state: CodecRequest
    pieces: list[np.ndarray] = field(default_factory=list)

    @property
    def pcm(self) -> torch.Tensor:
        """All samples so far."""
        return torch.from_numpy(np.concatenate(self.pieces)) if self.pieces else torch.empty(0)


class Driver:
    """Drives an engine step by step, by way of wire rows, and keeps to its contract."""

    def __init__(self, engine: CodecEngine) -> None:
        self.engine = engine

    def open(self, first: int = 5, chunk: int = 375, context: int = 25) -> Stream:
        """Admit a request."""
        params = stage_pb2.SpeechCodecParams(first_chunk_frames=first, chunk_frames=chunk, context_frames=context)
        admission = self.engine.admit(StageRequest("test", params))
        assert admission.needs_input
        return Stream(admission.state)

    def step(self, *windows: tuple[Stream, torch.Tensor, int]) -> StepResult:
        """One step over windows (stream, codes (T, K), context); samples go to their streams."""
        works = [
            Work(stream.state, len(stream.pieces), {"codes": code_rows(codes)}, context)
            for stream, codes, context in windows
        ]
        result = self.engine.step(works)
        assert len(result.next) == len(works)
        good = [stream for (stream, _, _), then in zip(windows, result.next, strict=True) if then is not Next.FAILED]
        assert {place for place, then in enumerate(result.next) if then is Next.FAILED} == set(result.errors)
        assert set(result.next) <= {Next.WAIT, Next.FAILED}
        for stream, rows in zip(good, result.tensors["pcm"].split(), strict=True):
            stream.pieces.append(rows.numpy().copy())
        return result

    def decode(self, codes: torch.Tensor, context: int = 0) -> torch.Tensor:
        """Samples of one window, decoded alone in a request of its own."""
        stream = self.open()
        result = self.step((stream, codes, context))
        assert not result.errors
        return stream.pcm


def code_rows(codes: torch.Tensor) -> Rows:
    """Codes as they come over the wire."""
    return rows_from_numpy(codes.to(torch.int32).numpy(), row_counts=[len(codes)])


@pytest.fixture
def make_engine() -> Callable[..., CodecEngine]:
    """A loaded engine of the golden model; keyword arguments are stage settings, those of `engine` a dict."""

    def make(engine: dict[str, object] | None = None, **changes: object) -> CodecEngine:
        settings = StageSettings(
            kind="voxtral.codec", addresses=("unix:none",), engine=engine or {}, **{"model": MODEL, **changes}
        )
        made = create_engine(settings)
        assert isinstance(made, CodecEngine)
        made.load()
        return made

    return make


@pytest.fixture
def make_driver(make_engine: Callable[..., CodecEngine]) -> Callable[..., Driver]:
    """A driver of an engine with these settings."""
    return lambda **changes: Driver(make_engine(**changes))


@pytest.fixture
def driver(make_driver: Callable[..., Driver]) -> Driver:
    """A driver of an engine with default settings: float32, batch_invariant."""
    return make_driver()
