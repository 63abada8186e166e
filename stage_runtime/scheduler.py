"""The step scheduler: continuous batching over one Engine, one request's failure kept apart from all others.

Runs on the engine thread and is entirely synchronous; commands come in as method calls, what happened goes out as events. Each
iteration drops what expired, admits who waits, takes all requests that can be stepped (same batch key, at most `capacity`), runs
one engine step and tells the outputs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

from stage_runtime.engine import CannotAdmitNow, Engine, Next, S, StageRequest, StepResult, Work
from stage_runtime.errors import (
    DeadlineExceeded,
    InternalError,
    NonFiniteOutput,
    OmnistageError,
    QueueFull,
    StageOutOfMemory,
    StageProtocolError,
)
from stage_runtime.logs import get_logger
from stage_runtime.memory import is_out_of_memory
from stage_runtime.tensors import Rows, nonfinite_requests

_log = get_logger(__name__)

# Input that a request may have waiting; a router that sends more does not keep to the credit of the lane.
MAX_WAITING_INPUTS = 64
# A hint only: how long a refused client should wait before it tries again.
QUEUE_RETRY_S = 1.0


class Key(NamedTuple):
    """A request: the lane it came by and its id there. A tuple, as it is hashed for every row of every step."""

    lane: int
    id: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine admitted a request."""

    key: Key
    text_token_count: int
    prompt_token_count: int


@dataclass(frozen=True, slots=True)
class Output:
    """Outputs of one engine step; `tensors` holds the rows of `keys`, in that order."""

    keys: tuple[Key, ...]
    indices: tuple[int, ...]
    tensors: Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a request has come."""

    key: Key
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended well."""

    key: Key
    step_count: int
    active_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended badly."""

    key: Key
    error: OmnistageError


Event = Accepted | Output | Progressed | Finished | Failed


@dataclass(frozen=True, slots=True)
class Load:
    """Counters since start, and the present fill. `ready` counts requests that could be stepped now."""

    step_count: int = 0
    row_count: int = 0
    aborted_count: int = 0
    busy_s: float = 0.0
    queued: int = 0
    active: int = 0
    ready: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """A new request: what the engine sees, its deadline on the monotonic clock (None: none), and its first credit."""

    key: Key
    request: StageRequest
    deadline: float | None = None
    credit: int = 1


@dataclass(frozen=True, slots=True)
class InputRow:
    """One request's part of an input step."""

    index: int
    tensors: Mapping[str, Rows]
    context_count: int = 0


@dataclass(slots=True)
class _Active(Generic[S]):
    """An admitted request."""

    key: Key
    request: StageRequest
    deadline: float | None
    state: S
    needs_input: bool
    output_index: int
    input_index: int
    credit: int
    since: float
    inputs: deque[InputRow] = field(default_factory=deque)
    ending: bool = False
    step_count: int = 0
    turn: int = 0

    @property
    def ready(self) -> bool:
        return self.credit > 0 and (bool(self.inputs) or not self.needs_input)


class Scheduler(Generic[S]):
    """See the module's docstring. `emit` gets every event, in order, on the calling thread."""

    def __init__(
        self,
        engine: Engine[S],
        *,
        max_queued: int,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._capacity = engine.describe().capacity
        self._max_queued = max_queued
        self._emit = emit
        self._clock = clock
        self._waiting: dict[Key, Submission] = {}
        self._early: dict[Key, tuple[deque[InputRow], bool]] = {}
        self._active: dict[Key, _Active[S]] = {}
        self._step_count = self._row_count = self._aborted_count = self._turn = 0
        self._busy_s = 0.0

    # Commands

    def submit(self, submission: Submission) -> None:
        """Take a new request: admit it if nobody waits before it, else queue it, else refuse it with QueueFull."""
        if not self._waiting and self._admit(submission):
            return
        if len(self._waiting) >= self._max_queued:
            self._refuse(submission, QueueFull("the stage", self._max_queued, retry_after_s=QUEUE_RETRY_S))
            return
        self._waiting[submission.key] = submission

    def give(self, key: Key, row: InputRow) -> None:
        """Give a request its next input; one for an unknown request is dropped (it may just have ended)."""
        active = self._active.get(key)
        if active is None:
            if key in self._waiting:
                self._early.setdefault(key, (deque(), False))[0].append(row)
            return
        expected = active.input_index + len(active.inputs)
        if row.index != expected or len(active.inputs) >= MAX_WAITING_INPUTS:
            self._fail(active, StageProtocolError(f"input step {row.index} came where {expected} was due"))
            return
        active.inputs.append(row)
        active.credit += 1

    def end(self, key: Key) -> None:
        """No more input will come for a request: it finishes when what it has was worked through."""
        if (active := self._active.get(key)) is not None:
            active.ending = True
            self._finish_if_ended(active)
        elif key in self._waiting:
            self._early[key] = (self._early.get(key, (deque(), False))[0], True)

    def credit(self, key: Key, steps: int) -> None:
        """Let a request give `steps` more outputs."""
        if (active := self._active.get(key)) is not None:
            active.credit += steps

    def abort(self, key: Key) -> None:
        """Drop a request without an answer."""
        self._early.pop(key, None)
        if self._waiting.pop(key, None) is not None:
            self._aborted_count += 1
        elif (active := self._active.get(key)) is not None:
            self._aborted_count += 1
            self._remove(active)

    def abort_lane(self, lane: int) -> None:
        """Drop all requests of a lane."""
        for key in [key for key in (*self._waiting, *self._active) if key.lane == lane]:
            self.abort(key)

    def fail_all(self, error: Callable[[], OmnistageError]) -> None:
        """Fail every request, waiting or active."""
        for waiting in list(self._waiting.values()):
            del self._waiting[waiting.key]
            self._refuse(waiting, error())
        for active in list(self._active.values()):
            self._fail(active, error())

    # State

    @property
    def idle(self) -> bool:
        """Whether there is no request at all."""
        return not self._waiting and not self._active

    def load(self) -> Load:
        """Counters and fill, now."""
        return Load(
            step_count=self._step_count,
            row_count=self._row_count,
            aborted_count=self._aborted_count,
            busy_s=self._busy_s,
            queued=len(self._waiting),
            active=len(self._active),
            ready=sum(active.ready for active in self._active.values()),
            free=max(0, self._capacity - len(self._active)),
        )

    def next_deadline(self) -> float | None:
        """The earliest deadline of any request, on the scheduler's clock."""
        deadlines = [waiting.deadline for waiting in self._waiting.values() if waiting.deadline]
        deadlines += [active.deadline for active in self._active.values() if active.deadline]
        return min(deadlines, default=None)

    # Work

    def tick(self) -> bool:
        """Drop what expired and admit who waits. Returns whether a step can be run."""
        self._expire()
        while self._waiting:
            key, submission = next(iter(self._waiting.items()))
            del self._waiting[key]
            if not self._admit(submission):
                self._waiting = {key: submission, **self._waiting}
                break
        return any(active.ready for active in self._active.values())

    def step(self) -> None:
        """Run one engine step over the requests whose turn it is; call only when `tick` returned True."""
        ready = sorted((active for active in self._active.values() if active.ready), key=lambda active: active.turn)
        key = self._engine.batch_key(ready[0].state)
        batch = [active for active in ready if self._engine.batch_key(active.state) == key][: self._capacity]
        self._turn += 1
        for active in batch:
            active.turn = self._turn
        started = self._clock()
        self._run(batch)
        self._busy_s += self._clock() - started

    def _admit(self, submission: Submission) -> bool:
        """Admit or refuse a request; False if it must wait."""
        key = submission.key
        if len(self._active) >= self._capacity:
            return False
        try:
            admission = self._engine.admit(submission.request)
        except CannotAdmitNow:
            return False
        except OmnistageError as error:
            self._refuse(submission, error)
            return True
        except Exception as error:  # noqa: BLE001  # the seam between engine and runtime: a bug fails this request alone
            self._refuse(submission, self._as_error(error, submission.request.request_id))
            return True
        self._turn += 1
        active = _Active(
            key=key,
            request=submission.request,
            deadline=submission.deadline,
            state=admission.state,
            needs_input=admission.needs_input,
            output_index=admission.first_index,
            input_index=admission.first_index,
            credit=max(1, submission.credit) if not admission.needs_input else max(0, submission.credit - 1),
            since=self._clock(),
            turn=self._turn,
        )
        self._active[key] = active
        self._emit(Accepted(key, admission.text_token_count, admission.prompt_token_count))
        inputs, ended = self._early.pop(key, (deque(), False))
        for row in inputs:
            self.give(key, row)
        if ended:
            self.end(key)
        return True

    def _refuse(self, submission: Submission, error: OmnistageError) -> None:
        self._early.pop(submission.key, None)
        self._emit(Failed(submission.key, error.with_request(submission.request.request_id)))

    def _expire(self) -> None:
        now = self._clock()
        for waiting in list(self._waiting.values()):
            if waiting.deadline and waiting.deadline <= now:
                del self._waiting[waiting.key]
                self._refuse(waiting, DeadlineExceeded("the request waited for its turn in the stage"))
        for active in [active for active in self._active.values() if active.deadline and active.deadline <= now]:
            self._fail(active, DeadlineExceeded("the stage worked on the request"))

    def _run(self, batch: Sequence[_Active[S]]) -> None:
        """One step, or on an error smaller ones until the request at fault stands alone."""
        works = [
            Work(active.state, active.output_index, row.tensors, row.context_count)
            for active in batch
            for row in [active.inputs[0] if active.inputs and active.needs_input else _NO_INPUT]
        ]
        try:
            result = self._engine.step(works)
        except Exception as error:  # noqa: BLE001  # the seam between engine and runtime: a bug fails one request alone
            if is_out_of_memory(error):
                self._engine.recover()
            if len(batch) == 1:
                self._fail(batch[0], self._as_error(error, batch[0].request.request_id))
                return
            _log.warning("batch_split", rows=len(batch), error=type(error).__name__)
            half = len(batch) // 2
            self._run(batch[:half])
            self._run(batch[half:])
            return
        self._step_count += 1
        self._row_count += len(batch)
        self._apply(batch, result)

    def _apply(self, batch: Sequence[_Active[S]], result: StepResult) -> None:
        """Tell the outputs of a step and move its requests on."""
        emitting = [
            active for active, then in zip(batch, result.next, strict=True) if then not in {Next.SILENT, Next.FAILED}
        ]
        bad = {
            emitting[place].key: name
            for name, rows in result.tensors.items()
            for place in nonfinite_requests(rows, len(emitting))
        }
        self._emit_outputs([active for active in emitting if active.key not in bad], emitting, result.tensors)
        for place, (active, then) in enumerate(zip(batch, result.next, strict=True)):
            active.step_count += 1
            if active.inputs and active.needs_input:
                active.inputs.popleft()
                active.input_index += 1
            if place in result.progress:
                self._emit(Progressed(active.key, *result.progress[place]))
            if then is Next.FAILED:
                self._fail(active, result.errors[place])
            elif active.key in bad:
                self._fail(active, NonFiniteOutput(bad[active.key], active.output_index))
            elif then is Next.SILENT:
                active.needs_input = False
            else:
                active.output_index += 1
                active.credit -= 1
                active.needs_input = then is Next.WAIT
                if then is Next.DONE:
                    self._finish(active)
                else:
                    self._finish_if_ended(active)

    def _emit_outputs(
        self, good: Sequence[_Active[S]], emitting: Sequence[_Active[S]], tensors: Mapping[str, Rows]
    ) -> None:
        if not good:
            return
        if len(good) < len(emitting):
            keep = [place for place, active in enumerate(emitting) if active in good]
            tensors = {name: rows.take(keep, len(emitting)) for name, rows in tensors.items()}
        self._emit(Output(tuple(a.key for a in good), tuple(a.output_index for a in good), tensors))

    def _finish_if_ended(self, active: _Active[S]) -> None:
        if active.ending and active.needs_input and not active.inputs:
            self._finish(active)

    def _finish(self, active: _Active[S]) -> None:
        self._remove(active)
        self._emit(Finished(active.key, active.step_count, self._clock() - active.since))

    def _fail(self, active: _Active[S], error: OmnistageError) -> None:
        self._remove(active)
        self._emit(Failed(active.key, error.with_request(active.request.request_id)))

    def _remove(self, active: _Active[S]) -> None:
        del self._active[active.key]
        self._engine.release(active.state)

    def _as_error(self, error: Exception, request_id: str) -> OmnistageError:
        if isinstance(error, OmnistageError):
            return error
        if is_out_of_memory(error):
            _log.warning("request_out_of_memory", request_id=request_id, error=str(error)[:300])
            return StageOutOfMemory(str(error).splitlines()[0][:200] if str(error) else type(error).__name__)
        _log.error("engine_bug", request_id=request_id, exc_info=error)
        return InternalError(request_id)


_NO_INPUT = InputRow(index=-1, tensors={})
