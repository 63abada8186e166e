"""Fixtures of the thinker tests: engines on the golden model, and a driver that feeds them as the step scheduler does."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnistage.stage.v1 import stage_pb2
from services.thinker.engine import ThinkerEngine, ThinkerRequest, create_engine
from stage_runtime.config import StageSettings
from stage_runtime.engine import Next, StageRequest, StepResult, Work
from stage_runtime.tensors import Rows, rows_from_numpy
from stage_runtime.torch_tensors import to_torch

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "embedded" / "voxtral-golden"
GOLDEN = ROOT / "tests" / "golden" / "voxtral"

Codes = Sequence[Sequence[int]]


@dataclass(eq=False)
class Request:
    """A request that the driver admitted; `outputs` holds its hidden states, each (D,), from index `first_index` on."""

    state: ThinkerRequest
    first_index: int
    text_token_count: int
    prompt_token_count: int
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def index(self) -> int:
        """Index of the next output."""
        return self.first_index + len(self.outputs)


class Driver:
    """Drives an engine step by step and keeps to its contract."""

    def __init__(self, engine: ThinkerEngine) -> None:
        self.engine = engine

    def submit(self, text: str, voice: str, *, max_frames: int = 40, prior: Codes | None = None) -> Request:
        """Admit a request."""
        tensors = {} if prior is None else {"codes": frame_rows(prior)}
        params = stage_pb2.SpeechThinkerParams(text=text, voice=voice, max_frames=max_frames)
        admission = self.engine.admit(StageRequest("test", params, tensors))
        assert not admission.needs_input
        return Request(admission.state, admission.first_index, admission.text_token_count, admission.prompt_token_count)

    def step(self, *pairs: tuple[Request, Sequence[int] | None]) -> StepResult:
        """One step over requests, each with its frame or None; outputs go to the requests."""
        works = [
            Work(request.state, request.index, {} if frame is None else {"codes": frame_rows([frame])})
            for request, frame in pairs
        ]
        result = self.engine.step(works)
        rows = iter(to_torch(result.tensors["hidden"]))
        for (request, _), following in zip(pairs, result.next, strict=True):
            if following is Next.WAIT:
                request.outputs.append(next(rows))
        assert next(rows, None) is None
        assert {place for place, following in enumerate(result.next) if following is Next.FAILED} == set(result.errors)
        return result

    def start(self, *requests: Request) -> None:
        """Step until each has given its first output."""
        while waiting := [request for request in requests if not request.outputs]:
            self.step(*((request, None) for request in waiting))

    def speak(self, request: Request, frames: Codes) -> torch.Tensor:
        """Start a request, feed it frames, release it; gives all its hidden states (outputs, D)."""
        self.start(request)
        for frame in frames:
            self.step((request, frame))
        self.engine.release(request.state)
        return torch.stack(request.outputs)


def frame_rows(frames: Codes) -> Rows:
    """Frames as they come over the wire."""
    return rows_from_numpy(np.array(frames, dtype=np.int32).reshape(len(frames), -1 if frames else 7))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads are a matter of the runtime; a test that sets another number must not affect others."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def golden() -> Callable[[str], dict[str, torch.Tensor]]:
    """Tensors of a golden file by its name."""
    return lambda name: load_file(GOLDEN / f"{name}.safetensors")


@pytest.fixture
def golden_json() -> Callable[[str], Any]:
    """Content of a golden JSON file by its name."""
    return lambda name: json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.fixture
def make_engine() -> Callable[..., ThinkerEngine]:
    """A function that makes an engine; keywords are settings of the stage, `engine` those of the engine."""

    def make(*, load: bool = True, **settings: Any) -> ThinkerEngine:
        defaults = {"kind": "voxtral.thinker", "addresses": ("unix:x",), "model": MODEL}
        engine = create_engine(StageSettings.model_validate(defaults | settings))
        assert isinstance(engine, ThinkerEngine)
        if load:
            engine.load()
        return engine

    return make


@pytest.fixture
def make_driver(make_engine: Callable[..., ThinkerEngine]) -> Callable[..., Driver]:
    """As make_engine, with a driver around."""
    return lambda **settings: Driver(make_engine(**settings))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that a test may damage."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy, copy_function=shutil.copyfile)
    return copy


@pytest.fixture
def make_frames() -> Callable[[int, int], list[list[int]]]:
    """Random frames: (count, seed) to lists of codes in range; a smaller count gives the first of them."""

    def make(count: int, seed: int) -> list[list[int]]:
        sizes = np.array([94, *[21] * 6])
        return (2 + np.random.default_rng(seed).random((count, 7)) * sizes).astype(int).tolist()

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
