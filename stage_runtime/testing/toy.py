"""An engine without a model whose behaviour each request chooses."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from pydantic import Field

from stage_runtime.config import Settings
from stage_runtime.engine import Admission, CannotAdmitNow, Next, StageDescription, StageRequest, StepResult, Work
from stage_runtime.errors import FieldViolation, InvalidRequest
from stage_runtime.tensors import DType, TensorSpec, concatenate, rows_from_numpy


class ToySettings(Settings):
    """Settings of a ToyEngine."""

    width: int = Field(4, ge=1, description="elements of a row")
    dtype: Literal["F32", "BF16"] = Field("F32", description="BF16 rows are echoed as they are; lock step only")
    capacity: int = Field(4, ge=1)
    room: int = Field(1_000_000, ge=1, description="states it admits; below capacity it shows how requests wait")
    step_s: float = Field(0.0, ge=0, description="how long a step takes")
    load_s: float = Field(0.0, ge=0, description="how long loading takes")


class ToyParams(Settings):
    """What a toy request asks for. Free running, output row t holds t; in lock step it holds the input plus one."""

    outputs: int = Field(1, ge=1, description="output steps")
    lock_step: bool = Field(default=False, description="each output needs an input")
    raise_at: int = Field(-1, description="output step at which the engine raises; -1: never")
    nan_at: int = Field(-1, description="output step whose row holds a NaN; -1: never")
    out_of_memory_rows: int = Field(0, ge=0, description="a step of this many rows raises MemoryError; 0: never")
    key: str = Field("", description="batch key")
    refuse: bool = Field(default=False, description="admission is refused")

    def to_struct(self) -> Struct:
        """The params of a Submit."""
        struct = Struct()
        struct.update(self.model_dump())
        return struct


@dataclass(slots=True)
class ToyState:
    """State of one request."""

    params: ToyParams
    done: int = 0


@dataclass(slots=True)
class ToyEngine:
    """See the package's docstring. `steps` records the number of rows of each step, `released` counts released states."""

    settings: ToySettings = field(default_factory=ToySettings)
    steps: list[int] = field(default_factory=list)
    alive: int = 0
    released: int = 0
    recovered: int = 0
    asleep: bool = False

    def load(self) -> None:
        """Take `load_s` seconds."""
        time.sleep(self.settings.load_s)

    def describe(self) -> StageDescription:
        """Tell what a toy is."""
        spec = (self.settings.width,)
        return StageDescription(
            kind="toy",
            model="toy",
            fingerprint="0",
            capacity=self.settings.capacity,
            inputs=(TensorSpec("in", DType[self.settings.dtype], spec),),
            outputs=(TensorSpec("out", DType[self.settings.dtype], spec),),
        )

    def admit(self, request: StageRequest) -> Admission[ToyState]:
        """Make a state, or refuse, or let it wait."""
        assert isinstance(request.params, Struct)
        params = ToyParams.model_validate(MessageToDict(request.params))
        if params.refuse:
            raise InvalidRequest([FieldViolation("refuse", "the request asked for it", "REFUSED")])
        if self.alive >= self.settings.room:
            raise CannotAdmitNow
        self.alive += 1
        state = ToyState(params)
        return Admission(state, needs_input=params.lock_step)

    def batch_key(self, state: ToyState) -> Hashable:
        """The key that the request chose."""
        return state.params.key

    def step(self, works: Sequence[Work[ToyState]]) -> StepResult:
        """One row for each work."""
        for work in works:
            limit = work.state.params.out_of_memory_rows
            if limit and len(works) >= limit:
                raise MemoryError("more rows than the request allowed")
            if work.state.params.raise_at == work.index:
                raise RuntimeError("the request asked for it")
        if self.settings.step_s:
            time.sleep(self.settings.step_s)
        self.steps.append(len(works))
        rows = np.empty((len(works), self.settings.width), np.float32)
        then = []
        for row, work in zip(rows, works, strict=True):
            if self.settings.dtype == "F32":
                row[:] = work.inputs["in"].numpy()[0] + 1 if work.state.params.lock_step else work.index
            if work.state.params.nan_at == work.index:
                row[0] = np.nan
            work.state.done += 1
            last = work.state.done == work.state.params.outputs
            then.append(Next.DONE if last else Next.WAIT if work.state.params.lock_step else Next.RUN)
        if self.settings.dtype == "BF16":
            return StepResult(then, {"out": concatenate([work.inputs["in"] for work in works])})
        return StepResult(then, {"out": rows_from_numpy(rows)})

    def release(self, state: ToyState) -> None:
        """Count it."""
        del state
        self.alive -= 1
        self.released += 1

    def recover(self) -> None:
        """Count it."""
        self.recovered += 1

    def sleep(self, level: int) -> None:
        """Remember it."""
        del level
        self.asleep = True

    def wake(self) -> None:
        """Forget it."""
        self.asleep = False
