"""The router's end of a lane, and the handle of one request on it.

Rows that several requests send in the same turn of the event loop leave as one Step message: batched steps stay batched without
any request knowing of another.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from omnistage.stage.v1 import stage_pb2, stage_pb2_grpc
from stage_runtime import lane
from stage_runtime.config import LaneSettings
from stage_runtime.errors import OmnistageError, StageProtocolError, StageReplicaLost, from_status
from stage_runtime.logs import get_logger
from stage_runtime.tensors import Rows, TensorSpec, check_tensors, concatenate, tensors_from_proto

_log = get_logger(__name__)

_PARAMS: dict[type, str] = {
    stage_pb2.SpeechThinkerParams: "speech_thinker",
    stage_pb2.SpeechAcousticParams: "speech_acoustic",
    stage_pb2.SpeechCodecParams: "speech_codec",
}


class LaneLost(Exception):
    """The lane broke or its peer misbehaved; the message says how."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request for a stage.

    `window` is the number of output steps the stage may run ahead of its reader; 0 means lock-step: one output, then one for
    each input sent.
    """

    request_id: str
    params: Message
    tensors: Mapping[str, Rows] = field(default_factory=dict)
    deadline: float | None = None
    traceparent: str = ""
    window: int = 0


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One request's part of an output step."""

    index: int
    tensors: Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class _InputRow:
    id: int
    index: int
    tensors: Mapping[str, Rows]
    context_count: int


class StageCall:
    """One request on a lane. Use as an async context manager: leaving it early aborts the request.

    Every method that waits raises the error with which the stage failed the request, or StageReplicaLost.
    """

    def __init__(self, owner: Lane, number: int, request: CallRequest) -> None:
        self.accepted: stage_pb2.Accepted | None = None
        self.progress: stage_pb2.Progress | None = None
        self._lane = owner
        self._id = number
        self._window = request.window
        self._outputs: deque[OutputRow] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: OmnistageError | None = None
        self._finished = False
        self._sent = 0
        self._due = 0
        self._owed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if not self._finished and self._error is None:
            self._lane.abort(self._id)
        self._lane.forget(self._id)

    @property
    def finished(self) -> bool:
        """Whether the stage has ended the request well."""
        return self._finished

    async def wait_accepted(self) -> stage_pb2.Accepted:
        """Wait until the stage's engine has admitted the request."""
        while self.accepted is None:
            await self._wait()
        return self.accepted

    def start_at(self, index: int) -> None:
        """The first input and the first output have this index (a resumed request); call at once after `Lane.call`."""
        self._sent = self._due = index

    def send(self, tensors: Mapping[str, Rows], *, context_count: int = 0) -> None:
        """Send the next input step. Raises the request's error if it has failed."""
        if self._error is not None:
            raise self._error
        self._lane.send(_InputRow(self._id, self._sent, tensors, context_count))
        self._sent += 1

    def end(self) -> None:
        """Tell the stage that no more input comes."""
        if not self._finished and self._error is None:
            self._lane.end(self._id)

    async def receive(self) -> OutputRow | None:
        """The next output step; None when the stage has finished the request."""
        while not self._outputs:
            if self._finished:
                return None
            await self._wait()
        row = self._outputs.popleft()
        if self._window:
            self._owed += 1
            if self._owed * 2 >= self._window and not self._finished:
                self._lane.credit(self._id, self._owed)
                self._owed = 0
        return row

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._outputs:
            raise self._error

    # Called by the lane.

    def deliver(self, row: OutputRow) -> None:
        """Take an output. Raises StageProtocolError if it is not the next one."""
        if row.index != self._due:
            raise StageProtocolError(f"output step {row.index} came where {self._due} was due")
        self._due += 1
        self._outputs.append(row)
        self._wake()

    def accept(self, accepted: stage_pb2.Accepted) -> None:
        """The request was admitted."""
        self.accepted = accepted
        self._wake()

    def finish(self) -> None:
        """The request ended well."""
        self._finished = True
        self._wake()

    def fail(self, error: OmnistageError) -> None:
        """The request ended badly."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Lane:
    """One lane to one stage replica. `run` lives as long as the lane; other methods are for the loop's thread."""

    def __init__(  # noqa: PLR0913  # three of them are names for logs and errors
        self,
        channel: grpc.aio.Channel,
        settings: LaneSettings,
        *,
        stage: str,
        address: str,
        router: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when the stage begins to drain."""
        self.description = stage_pb2.DescribeStageResponse()
        self.heartbeat = stage_pb2.Heartbeat()
        self.messages_sent = 0
        self.messages_received = 0
        self._on_change = on_change
        self._stage = stage
        self._address = address
        self._router = router
        self._settings = settings
        self._stub: stage_pb2_grpc.StageServiceAsyncStub = stage_pb2_grpc.StageServiceStub(channel)
        self._stream: Any = None
        self._outputs: tuple[TensorSpec, ...] = ()
        self._calls: dict[int, StageCall] = {}
        self._next_id = 1
        self._submits: list[stage_pb2.Submit] = []
        self._rows: list[_InputRow] = []
        self._ends: list[int] = []
        self._aborts: list[int] = []
        self._credits: dict[int, list[int]] = {}
        self._some = asyncio.Event()
        self._condemned: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_sign = time.monotonic()
        self._last_progress = time.monotonic()

    async def connect(self) -> stage_pb2.DescribeStageResponse:
        """Describe the stage and open the lane.

        Raises OmnistageError (StageLoading, ProtocolMismatch, …) or grpc.aio.AioRpcError if that does not succeed in time.
        """
        async with asyncio.timeout(self._settings.connect_timeout_s):
            self.description = await self._stub.DescribeStage(
                stage_pb2.DescribeStageRequest(), timeout=self._settings.connect_timeout_s
            )
            lane.check_protocol(self.description.protocol)
            self._outputs = tuple(TensorSpec.from_proto(spec) for spec in self.description.outputs)
            self._stream = self._stub.Run()
            await self._stream.write(
                stage_pb2.RunRequest(
                    open=stage_pb2.Open(
                        protocol=lane.protocol_version(),
                        router=self._router,
                        heartbeat_interval=lane.duration(self._settings.heartbeat_interval_s),
                    )
                )
            )
            opened = await self._stream.read()
            if opened is grpc.aio.EOF or opened.WhichOneof("message") != "opened":
                raise StageProtocolError("the stage did not answer `open` with `opened`")
        self._last_sign = self._last_progress = time.monotonic()
        return self.description

    async def run(self) -> None:
        """Carry messages until the lane breaks; then fail its requests and raise LaneLost. Cancel it to close the lane."""
        reason = "the router closed the lane"
        tasks = [
            asyncio.create_task(coroutine, name=f"lane-{name}-{self._address}")
            for name, coroutine in (("read", self._read()), ("write", self._write()), ("watch", self._watch()))
        ]
        tasks.append(asyncio.create_task(self._await_condemnation(), name=f"lane-verdict-{self._address}"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = _why(next(iter(done)).exception())
        finally:
            for task in tasks:
                task.cancel()
            self._stream.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lose(reason)
        raise LaneLost(reason)

    def call(self, request: CallRequest) -> StageCall:
        """Submit a request. Whether the stage takes it shows when the handle is waited for."""
        number = self._next_id
        self._next_id += 1
        submit = stage_pb2.Submit(
            id=number,
            request_id=request.request_id,
            traceparent=request.traceparent,
            credit=request.window,
            tensors=[rows.to_proto(name) for name, rows in request.tensors.items()],
        )
        getattr(submit, _PARAMS.get(type(request.params), "custom")).CopyFrom(request.params)
        if request.deadline is not None:
            submit.time_left.CopyFrom(lane.duration(request.deadline - time.monotonic()))
        call = StageCall(self, number, request)
        self._calls[number] = call
        self._submits.append(submit)
        self._some.set()
        return call

    def condemn(self, reason: str) -> None:
        """The stage misbehaved in a way that only its caller could see: the lane ends as if it had broken."""
        if not self._condemned.done():
            self._condemned.set_result(reason)

    async def _await_condemnation(self) -> None:
        raise LaneLost(await self._condemned)

    @property
    def draining(self) -> bool:
        """Whether the stage said that it takes no new requests."""
        return self.heartbeat.draining

    @property
    def in_flight(self) -> int:
        """Requests of this router on the lane."""
        return len(self._calls)

    def send(self, row: _InputRow) -> None:
        """Queue an input row; rows queued in the same turn of the loop leave together."""
        self._rows.append(row)
        self._some.set()

    def end(self, number: int) -> None:
        """Queue an end of input."""
        self._ends.append(number)
        self._some.set()

    def credit(self, number: int, steps: int) -> None:
        """Queue credit."""
        self._credits.setdefault(steps, []).append(number)
        self._some.set()

    def abort(self, number: int) -> None:
        """Queue an abort; a request that was not sent yet is simply not sent."""
        unsent = len(self._submits)
        self._submits = [submit for submit in self._submits if submit.id != number]
        self._rows = [row for row in self._rows if row.id != number]
        if len(self._submits) == unsent:
            self._aborts.append(number)
            self._some.set()

    def forget(self, number: int) -> None:
        """The request's handle is closed: what still comes for it is dropped."""
        self._calls.pop(number, None)

    def _lose(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(StageReplicaLost(self._stage, self._address, reason))

    async def _write(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            for message in self._take():
                self.messages_sent += 1
                await self._stream.write(message)

    def _take(self) -> list[stage_pb2.RunRequest]:
        messages = [stage_pb2.RunRequest(submit=submit) for submit in self._submits]
        messages += _steps(self._rows)
        messages += [
            stage_pb2.RunRequest(credit=stage_pb2.Credit(ids=ids, step_count=steps))
            for steps, ids in self._credits.items()
        ]
        if self._ends:
            messages.append(stage_pb2.RunRequest(end=stage_pb2.End(ids=self._ends)))
        if self._aborts:
            messages.append(stage_pb2.RunRequest(abort=stage_pb2.Abort(ids=self._aborts)))
        self._submits, self._rows, self._ends, self._aborts, self._credits = [], [], [], [], {}
        return messages

    async def _read(self) -> None:
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            self.messages_received += 1
            self._last_sign = time.monotonic()
            self._handle(message)

    def _handle(self, message: stage_pb2.RunResponse) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._deliver(message.step)
            case "heartbeat":
                self._beat(message.heartbeat)
            case "accepted" | "progress" | "finished" | "failed" as kind:
                body = getattr(message, kind)
                if (call := self._calls.get(body.id)) is not None:
                    self._tell(call, body)
            case _:  # of a newer minor version
                _log.warning("lane_message_unknown", stage=self._stage, replica=self._address)

    def _tell(self, call: StageCall, message: Message) -> None:
        match message:
            case stage_pb2.Accepted():
                call.accept(message)
            case stage_pb2.Progress():
                call.progress = message
            case stage_pb2.Finished():
                call.finish()
            case stage_pb2.Failed():
                call.fail(from_status(message.status).at_stage(self._stage, self._address))

    def _deliver(self, step: stage_pb2.Step) -> None:
        count = len(step.ids)
        if len(step.indices) != count or len(set(step.ids)) != count:
            raise StageProtocolError("ids and indices of a step differ in number, or an id is there twice")
        tensors = tensors_from_proto(step.tensors, count)
        check_tensors(tensors, self._outputs)
        parts = {name: rows.split() for name, rows in tensors.items()}
        for place, number in enumerate(step.ids):
            if (call := self._calls.get(number)) is not None:
                call.deliver(OutputRow(step.indices[place], {name: rows[place] for name, rows in parts.items()}))

    def _beat(self, heartbeat: stage_pb2.Heartbeat) -> None:
        moved = heartbeat.step_count != self.heartbeat.step_count
        if moved or not (heartbeat.ready_count and self.heartbeat.ready_count):
            self._last_progress = time.monotonic()
        changed = heartbeat.draining != self.heartbeat.draining
        self.heartbeat = heartbeat
        if changed:
            self._on_change()

    async def _watch(self) -> None:
        """End when the peer has given no sign of life, or its engine stands still, for too long."""
        interval_s = self._settings.heartbeat_interval_s
        silence_s = interval_s * self._settings.missed_heartbeats
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval_s / 2)
            now = time.monotonic()
            if now - before > interval_s:  # this process stood still: its peers cannot be blamed for the silence
                self._last_sign = self._last_progress = now
            elif now - self._last_sign > silence_s:
                raise LaneLost(f"no sign of life for {silence_s:g} s")
            elif now - self._last_progress > self._settings.engine_stall_s:
                raise LaneLost(f"its engine stood still for {self._settings.engine_stall_s:g} s with work to do")


def _steps(rows: Sequence[_InputRow]) -> list[stage_pb2.RunRequest]:
    """Rows as few Step messages as can be: one, unless a request has two rows."""
    messages: list[stage_pb2.RunRequest] = []
    rest = list(rows)
    while rest:
        batch: dict[int, _InputRow] = {}
        later = []
        for row in rest:
            if row.id in batch:
                later.append(row)
            else:
                batch[row.id] = row
        chosen = list(batch.values())
        tensors = {name: concatenate([row.tensors[name] for row in chosen]) for name in chosen[0].tensors}
        contexts = [row.context_count for row in chosen]
        step = lane.StepPart(
            [row.id for row in chosen], [row.index for row in chosen], tensors, contexts if any(contexts) else ()
        )
        for part in step.split():
            message = stage_pb2.RunRequest()
            part.write_to(message.step)
            messages.append(message)
        rest = later
    return messages


def _why(error: BaseException | None) -> str:
    match error:
        case None:
            return "the stage closed the lane"
        case grpc.aio.AioRpcError():
            return f"{error.code().name}: {(error.details() or 'no details')[:200]}"
        case LaneLost() | OmnistageError():
            return str(error)
        case _:
            _log.error("lane_bug", exc_info=error)
            return f"an internal error of the router ({type(error).__name__})"
