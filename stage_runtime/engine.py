"""What a stage author writes: an Engine. stage_runtime does the rest.

An Engine is synchronous, runs on one dedicated thread, and knows nothing of gRPC, asyncio or other requests' fate. The step
scheduler (stage_runtime.scheduler) calls it; nobody else does.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from stage_runtime.errors import OmnistageError
from stage_runtime.tensors import Rows, TensorSpec

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StageDescription:
    """What an engine tells of itself, after `load`.

    `facts` is a message that DescribeStageResponse.facts can hold, or None. `capacity` is the most states alive at once, and
    the most that one `step` gets.
    """

    kind: str
    model: str
    fingerprint: str
    capacity: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    facts: Message | None = None


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A request as an engine sees it. `params` is the message of Submit.params; each of `tensors` holds this request's rows."""

    request_id: str
    params: Message
    tensors: Mapping[str, Rows] = field(default_factory=dict)


class CannotAdmitNow(Exception):
    """Raised by Engine.admit: there is no room now, but there will be when others have ended. The request waits in line."""


@dataclass(frozen=True, slots=True)
class Admission(Generic[S]):
    """Answer of Engine.admit. `first_index` is the index of the first output step (above 0 when a request is resumed)."""

    state: S
    needs_input: bool
    first_index: int = 0
    text_token_count: int = 0
    prompt_token_count: int = 0


@dataclass(frozen=True, slots=True)
class Work(Generic[S]):
    """One request's part of a step.

    `index` is the index of the output step this work leads to. `inputs` holds the request's own rows of each input tensor
    (checked against the specs), or nothing if the state asked for none. `context_count` says how many of the first rows are
    left context.
    """

    state: S
    index: int
    inputs: Mapping[str, Rows]
    context_count: int = 0


class Next(enum.Enum):
    """What a request does after a step."""

    WAIT = enum.auto()  # it gave an output and waits for input
    RUN = enum.auto()  # it gave an output and can go on
    SILENT = enum.auto()  # it gave no output and can go on (a prefill in pieces, say)
    DONE = enum.auto()  # it gave its last output
    FAILED = enum.auto()  # it gave nothing: its error stands in StepResult.errors


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answer of Engine.step.

    `next` has one entry for each work. `tensors` holds, in the order of the works, the rows of those that gave an output (WAIT, RUN,
    DONE). `errors` holds the error of each work that FAILED, by its place. `progress` holds (done, total) by place, optionally.
    """

    next: Sequence[Next]
    tensors: Mapping[str, Rows]
    errors: Mapping[int, OmnistageError] = field(default_factory=dict)
    progress: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class Engine(Protocol[S]):
    """Model code of one stage. `S` is its own per-request state. No method is called before `load` or while asleep."""

    def load(self) -> None:
        """Load weights and warm up. Raises CheckpointDamaged or another OmnistageError: the process then exits with it."""

    def describe(self) -> StageDescription:
        """Tell what was loaded. Cheap; the same answer every time."""

    def admit(self, request: StageRequest) -> Admission[S]:
        """Check a request and make its state, reserving all memory it may ever need.

        Raises InvalidRequest, UnknownVoice or another OmnistageError to refuse it, CannotAdmitNow to let it wait.
        """

    def batch_key(self, state: S) -> Hashable:
        """States share a step only if their keys are equal."""

    def step(self, works: Sequence[Work[S]]) -> StepResult:
        """Run one batched forward pass, at most `capacity` works.

        Either returns, or raises and leaves every state as it was: the scheduler then tries smaller batches to find the
        request at fault. Results must not depend on which works share the batch beyond the stated tolerance, and not at all
        with `batch_invariant`.
        """

    def release(self, state: S) -> None:
        """Give back what `admit` reserved. Called exactly once for each admitted state. Must not raise."""

    def recover(self) -> None:
        """Give caches back to the allocator after an out-of-memory error, before the next try."""

    def sleep(self, level: int) -> None:
        """Free memory (1: leave the accelerator, 2: leave memory). Called only without states."""

    def wake(self) -> None:
        """Undo `sleep`."""
