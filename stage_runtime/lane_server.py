"""StageService: the stage's end of the lane, DescribeStage, Sleep, Wake and Drain."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from omnistage.stage.v1 import stage_pb2, stage_pb2_grpc
from stage_runtime import lane
from stage_runtime.engine import StageDescription, StageRequest
from stage_runtime.engine_thread import EngineThread
from stage_runtime.errors import (
    Draining,
    FieldViolation,
    InvalidRequest,
    OmnistageError,
    StageLoading,
    StageProtocolError,
)
from stage_runtime.logs import get_logger
from stage_runtime.scheduler import (
    Accepted,
    Event,
    Failed,
    Finished,
    InputRow,
    Key,
    Output,
    Progressed,
    Scheduler,
    Submission,
)
from stage_runtime.tensors import Rows, check_tensors, tensors_from_proto
from stage_runtime.version import VERSION

_log = get_logger(__name__)

DEFAULT_HEARTBEAT_S = 2.0
MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 0.1, 60.0
# How often Drain looks whether the engine is idle.
DRAIN_POLL_S = 0.02

Context = grpc.aio.ServicerContext[Any, Any]


class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """Serves one engine. Create and use it on the event loop's thread; `deliver` is called by the engine's thread."""

    def __init__(self, stage: str, *, max_queued: int, drain_grace_s: float) -> None:
        self.draining = asyncio.Event()
        self._stage = stage
        self._max_queued = max_queued
        self._drain_grace_s = drain_grace_s
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, lane.Outbox[stage_pb2.RunResponse]] = {}
        self._next_lane = 0
        self._engine: EngineThread | None = None
        self._description: StageDescription | None = None

    def attach(self, engine: EngineThread) -> None:
        """Name the engine thread, before the server starts."""
        self._engine = engine

    def loaded(self, description: StageDescription) -> None:
        """The engine has loaded: requests are taken from now on."""
        self._description = description

    def deliver(self, events: Sequence[Event]) -> None:
        """Take the events of one engine iteration, on the engine's thread, and hand them to the lanes they belong to."""
        by_lane: dict[int, list[stage_pb2.RunResponse]] = defaultdict(list)
        for event in events:
            _render(event, by_lane)
        self._loop.call_soon_threadsafe(self._put, by_lane)

    def _put(self, by_lane: dict[int, list[stage_pb2.RunResponse]]) -> None:
        for number, messages in by_lane.items():
            if (outbox := self._lanes.get(number)) is not None:
                outbox.put(*messages)

    def _ready(self) -> tuple[EngineThread, StageDescription]:
        if self._engine is None or self._description is None:
            raise StageLoading(self._stage)
        return self._engine, self._description

    async def DescribeStage(
        self, request: stage_pb2.DescribeStageRequest, context: Context
    ) -> stage_pb2.DescribeStageResponse:
        """See stage.proto."""
        _, description = self._ready()
        response = stage_pb2.DescribeStageResponse(
            kind=description.kind,
            model=description.model,
            model_fingerprint=description.fingerprint,
            protocol=lane.protocol_version(),
            server_version=VERSION,
            capacity_count=description.capacity,
            max_queued_count=self._max_queued,
            inputs=[spec.to_proto() for spec in description.inputs],
            outputs=[spec.to_proto() for spec in description.outputs],
        )
        if description.facts is not None:
            field = _FACTS.get(type(description.facts), "custom")
            getattr(response, field).CopyFrom(description.facts)
        return response

    async def Run(  # type: ignore[override]  # the stubs know only generators; grpc.aio also takes this form
        self, request_iterator: AsyncIterator[stage_pb2.RunRequest], context: Context
    ) -> None:
        """See stage.proto. Reads and writes through the context: that is faster than an async generator."""
        engine, description = self._ready()
        if self.draining.is_set():
            raise Draining(f"stage {self._stage!r}")
        interval_s = await self._open(context)
        number = self._next_lane
        self._next_lane += 1
        outbox: lane.Outbox[stage_pb2.RunResponse] = lane.Outbox()
        self._lanes[number] = outbox
        reader = _LaneReader(number, engine, description, self)
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(outbox.write_to(context.write))
                heart = group.create_task(self._beat(outbox, interval_s))
                while (message := await context.read()) is not grpc.aio.EOF:
                    outbox.put(*reader.handle(message))
                writer.cancel()
                heart.cancel()
        finally:
            del self._lanes[number]
            engine.post(lambda scheduler: scheduler.abort_lane(number))
            _log.info("lane_closed", stage=self._stage, lane=number)

    async def _open(self, context: Context) -> float:
        first = await context.read()
        if first is grpc.aio.EOF or first.WhichOneof("message") != "open":
            raise StageProtocolError("the first message of a lane must be `open`")
        lane.check_protocol(first.open.protocol)
        interval_s = DEFAULT_HEARTBEAT_S
        if first.open.HasField("heartbeat_interval"):
            interval_s = min(MAX_HEARTBEAT_S, max(MIN_HEARTBEAT_S, lane.seconds(first.open.heartbeat_interval)))
        opened = stage_pb2.Opened(protocol=lane.protocol_version(), heartbeat_interval=lane.duration(interval_s))
        await context.write(stage_pb2.RunResponse(opened=opened))
        _log.info("lane_opened", stage=self._stage, router=first.open.router)
        return interval_s

    async def _beat(self, outbox: lane.Outbox[stage_pb2.RunResponse], interval_s: float) -> None:
        while True:
            if not outbox:  # a router that does not read gets no pile of heartbeats
                outbox.put(stage_pb2.RunResponse(heartbeat=self.heartbeat()))
            await asyncio.sleep(interval_s)

    def heartbeat(self) -> stage_pb2.Heartbeat:
        """The present load."""
        engine, _ = self._ready()
        load = engine.load
        return stage_pb2.Heartbeat(
            step_count=load.step_count,
            row_count=load.row_count,
            queued_count=load.queued,
            active_count=load.active,
            ready_count=load.ready,
            free_count=load.free,
            busy=lane.duration(load.busy_s),
            aborted_count=load.aborted_count,
            draining=self.draining.is_set(),
        )

    async def Sleep(self, request: stage_pb2.SleepRequest, context: Context) -> stage_pb2.SleepResponse:
        """See stage.proto."""
        engine, _ = self._ready()
        level = request.level if request.HasField("level") else 1
        if level not in {1, 2}:
            raise InvalidRequest([FieldViolation("level", f"is {level}; levels are 1 and 2", "OUT_OF_RANGE")])
        await asyncio.wrap_future(engine.sleep(level))
        return stage_pb2.SleepResponse()

    async def Wake(self, request: stage_pb2.WakeRequest, context: Context) -> stage_pb2.WakeResponse:
        """See stage.proto."""
        engine, _ = self._ready()
        await asyncio.wrap_future(engine.wake())
        return stage_pb2.WakeResponse()

    async def Drain(self, request: stage_pb2.DrainRequest, context: Context) -> stage_pb2.DrainResponse:
        """See stage.proto."""
        timeout_s = lane.seconds(request.timeout) if request.HasField("timeout") else self._drain_grace_s
        return stage_pb2.DrainResponse(remaining_count=await self.drain(timeout_s))

    async def drain(self, timeout_s: float) -> int:
        """Take no new requests; wait for the active ones. Returns how many are left when the timeout has passed."""
        self.draining.set()
        for outbox in self._lanes.values():
            if self._description is not None:
                outbox.put(stage_pb2.RunResponse(heartbeat=self.heartbeat()))
        until = time.monotonic() + timeout_s
        while (left := self._alive()) and time.monotonic() < until:  # noqa: ASYNC110  # the engine is no asyncio task
            await asyncio.sleep(DRAIN_POLL_S)
        return left

    def _alive(self) -> int:
        if self._engine is None or self._description is None:
            return 0
        load = self._engine.load
        return load.active + load.queued

    async def fail_rest(self) -> None:
        """Fail what is still there with Draining, and let the lanes send it."""
        if self._engine is None or self._description is None:
            return
        what = f"stage {self._stage!r}"
        await asyncio.wrap_future(self._engine.call(lambda scheduler: scheduler.fail_all(lambda: Draining(what))))
        while any(self._lanes.values()):  # noqa: ASYNC110  # a grace for the writers, ended by the server's stop
            await asyncio.sleep(DRAIN_POLL_S)


class _LaneReader:
    """Turns the messages of one lane into commands for the engine thread."""

    def __init__(self, number: int, engine: EngineThread, description: StageDescription, stage: StageServicer) -> None:
        self._number = number
        self._engine = engine
        self._description = description
        self._stage = stage
        self._last_id = -1

    def handle(self, message: stage_pb2.RunRequest) -> list[stage_pb2.RunResponse]:
        """Handle one message; returns what must be answered at once. Raises StageProtocolError if the lane must end."""
        match message.WhichOneof("message"):
            case "step":
                return self._step(message.step)
            case "submit":
                return self._submit(message.submit)
            case "abort":
                self._each(message.abort.ids, Scheduler.abort)
            case "end":
                self._each(message.end.ids, Scheduler.end)
            case "credit":
                self._credit(message.credit)
            case "open":
                raise StageProtocolError("`open` came twice")
            case _:
                _log.warning("lane_message_unknown", lane=self._number)  # of a newer minor version
        return []

    def _key(self, number: int) -> Key:
        return Key(self._number, number)

    def _each(self, ids: Sequence[int], command: Callable[[Scheduler[Any], Key], None]) -> None:
        keys = [self._key(number) for number in ids]

        def run(scheduler: Scheduler[Any]) -> None:
            for key in keys:
                command(scheduler, key)

        self._engine.post(run)

    def _credit(self, message: stage_pb2.Credit) -> None:
        steps = message.step_count
        self._each(message.ids, lambda scheduler, key: scheduler.credit(key, steps))

    def _submit(self, message: stage_pb2.Submit) -> list[stage_pb2.RunResponse]:
        if message.id <= self._last_id:
            raise StageProtocolError(f"request key {message.id} came after {self._last_id}; keys of a lane must rise")
        self._last_id = message.id
        try:
            if self._stage.draining.is_set():
                raise Draining("the stage")
            self._engine.check_awake()
            field = message.WhichOneof("params")
            if field is None:
                raise StageProtocolError("`submit` has no params")
            request = StageRequest(message.request_id, getattr(message, field), tensors_from_proto(message.tensors, 1))
        except OmnistageError as error:
            return [_failed(message.id, error.with_request(message.request_id))]
        deadline = time.monotonic() + lane.seconds(message.time_left) if message.HasField("time_left") else None
        submission = Submission(self._key(message.id), request, deadline, message.credit or 1)
        self._engine.post(lambda scheduler: scheduler.submit(submission))
        return []

    def _step(self, message: stage_pb2.Step) -> list[stage_pb2.RunResponse]:
        try:
            rows = _input_rows(message, self._description)
        except StageProtocolError as error:
            ids = list(message.ids)
            self._each(ids, Scheduler.abort)
            return [_failed(number, error) for number in ids]
        pairs = [(self._key(number), row) for number, row in zip(message.ids, rows, strict=True)]

        def run(scheduler: Scheduler[Any]) -> None:
            for key, row in pairs:
                scheduler.give(key, row)

        self._engine.post(run)
        return []


def _input_rows(message: stage_pb2.Step, description: StageDescription) -> list[InputRow]:
    count = len(message.ids)
    contexts = message.context_counts or (0,) * count
    if len(message.indices) != count or len(contexts) != count or len(set(message.ids)) != count:
        raise StageProtocolError("ids, indices and context counts of a step differ in number, or an id is there twice")
    tensors = tensors_from_proto(message.tensors, count)
    check_tensors(tensors, description.inputs)
    parts: dict[str, list[Rows]] = {name: rows.split() for name, rows in tensors.items()}
    return [
        InputRow(index, {name: rows[place] for name, rows in parts.items()}, context)
        for place, (index, context) in enumerate(zip(message.indices, contexts, strict=True))
    ]


def _render(event: Event, by_lane: dict[int, list[stage_pb2.RunResponse]]) -> None:
    match event:
        case Output():
            numbers = [key.lane for key in event.keys]
            for number in dict.fromkeys(numbers):
                places = [place for place, owner in enumerate(numbers) if owner == number]
                step = lane.StepPart(
                    [event.keys[place].id for place in places],
                    [event.indices[place] for place in places],
                    {name: rows.take(places, len(numbers)) for name, rows in event.tensors.items()},
                )
                for part in step.split():
                    response = stage_pb2.RunResponse()
                    part.write_to(response.step)
                    by_lane[number].append(response)
        case Accepted(key=key):
            accepted = stage_pb2.Accepted(
                id=key.id, text_token_count=event.text_token_count, prompt_token_count=event.prompt_token_count
            )
            by_lane[key.lane].append(stage_pb2.RunResponse(accepted=accepted))
        case Progressed(key=key):
            progress = stage_pb2.Progress(id=key.id, done_count=event.done, total_count=event.total)
            by_lane[key.lane].append(stage_pb2.RunResponse(progress=progress))
        case Finished(key=key):
            finished = stage_pb2.Finished(id=key.id, step_count=event.step_count, active=lane.duration(event.active_s))
            by_lane[key.lane].append(stage_pb2.RunResponse(finished=finished))
        case Failed(key=key):
            by_lane[key.lane].append(_failed(key.id, event.error))


def _failed(number: int, error: OmnistageError) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(failed=stage_pb2.Failed(id=number, status=error.to_status()))


_FACTS: dict[type, str] = {
    stage_pb2.SpeechThinkerFacts: "speech_thinker",
    stage_pb2.SpeechCodecFacts: "speech_codec",
}
