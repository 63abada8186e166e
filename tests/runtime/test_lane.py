"""Both ends of the lane over a real socket, with the toy engine behind it."""

import asyncio
import contextlib
import time

import grpc.aio
import numpy as np
import pytest

from omnistage.stage.v1 import stage_pb2, stage_pb2_grpc
from stage_runtime.config import LaneSettings
from stage_runtime.engine_thread import EngineThread
from stage_runtime.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    QueueFull,
    StageAsleep,
    StageProtocolError,
    StageReplicaLost,
)
from stage_runtime.lane_client import CallRequest, Lane, LaneLost
from stage_runtime.lane_server import StageServicer
from stage_runtime.tensors import rows_from_numpy
from stage_runtime.testing import ToyEngine, ToyParams, ToySettings

LANE = LaneSettings(heartbeat_interval_s=0.1, missed_heartbeats=5, connect_timeout_s=5)


class Stage:
    """A toy stage in this process, and a lane to it."""

    def __init__(self, engine, servicer, server, port, thread):
        self.engine, self.servicer, self.server, self.port, self.thread = engine, servicer, server, port, thread
        self.address = f"127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def toy_stage(max_queued=64, **settings):
    """Serve a toy engine on a free port."""
    engine = ToyEngine(ToySettings(**settings))
    servicer = StageServicer("toy", max_queued=max_queued, drain_grace_s=1)
    thread = EngineThread(lambda: engine, stage="toy", max_queued=max_queued, deliver=servicer.deliver)
    servicer.attach(thread)
    server = grpc.aio.server()
    stage_pb2_grpc.add_StageServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    thread.start()
    servicer.loaded(await asyncio.wrap_future(thread.loaded))
    try:
        yield Stage(engine, servicer, server, port, thread)
    finally:
        await server.stop(None)
        thread.stop()


@contextlib.asynccontextmanager
async def open_lane(address, settings=LANE):
    """A lane to an address, carried until the end of the block."""
    async with grpc.aio.insecure_channel(address) as channel:
        lane = Lane(channel, settings, stage="toy", address=address, router="test")
        await lane.connect()
        carrier = asyncio.create_task(lane.run())
        try:
            yield lane
        finally:
            carrier.cancel()
            await asyncio.gather(carrier, return_exceptions=True)


def toy(request_id="r1", *, window=0, deadline=None, **params):
    """A request for the toy engine."""
    return CallRequest(request_id, ToyParams(**params).to_struct(), window=window, deadline=deadline)


def row(value):
    """One input row."""
    return {"in": rows_from_numpy(np.full((1, 4), value, np.float32))}


async def values(call):
    """All outputs of a call, as numbers."""
    found = []
    while (output := await call.receive()) is not None:
        found.append(float(output.tensors["out"].numpy()[0][0]))
    return found


async def until(condition, timeout_s=5.0):
    """Wait until a condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        await asyncio.sleep(0.01)


async def test_a_free_running_request_gives_all_its_outputs_in_order():
    """Accepted, outputs 0 to 9, finished."""
    async with toy_stage() as stage, open_lane(stage.address) as lane, lane.call(toy(outputs=10, window=4)) as call:
        await call.wait_accepted()

        assert await values(call) == list(range(10))
        assert call.finished


async def test_rows_sent_in_one_turn_leave_as_one_message():
    """Thirty-two requests in lock step cost one Step message each way and step, not thirty-two."""
    async with toy_stage(capacity=32) as stage, open_lane(stage.address) as lane, contextlib.AsyncExitStack() as stack:
        calls = [
            await stack.enter_async_context(lane.call(toy(f"r{n}", outputs=1000, lock_step=True))) for n in range(32)
        ]
        await asyncio.gather(*(call.wait_accepted() for call in calls))
        sent, received = lane.messages_sent, lane.messages_received
        beats = stage.servicer.heartbeat  # noqa: F841

        for step in range(10):
            for number, call in enumerate(calls):
                call.send(row(number + step))
            outputs = await asyncio.gather(*(call.receive() for call in calls))
            assert [float(o.tensors["out"].numpy()[0][0]) for o in outputs] == [n + step + 1 for n in range(32)]

        assert lane.messages_sent - sent == 10
        assert lane.messages_received - received <= 10 + 10  # heartbeats come in between
        assert stage.engine.steps == [32] * 10


async def test_closing_a_call_early_aborts_it_and_only_it():
    """The engine drops it before its next step; a neighbour gets everything."""
    async with toy_stage(step_s=0.01) as stage, open_lane(stage.address) as lane:
        async with lane.call(toy("keeps", outputs=30, window=100)) as keeps:
            async with lane.call(toy("goes", outputs=1000, window=2000)) as goes:
                await goes.receive()
            await until(lambda: stage.engine.alive == 1)
            steps = len(stage.engine.steps)
            assert steps < 30

            assert len(await values(keeps)) == 30
        await until(lambda: stage.engine.alive == 0)
        assert stage.thread.load.aborted_count == 1


async def test_a_hundred_normal_requests_send_no_abort():
    """Ending well is told as such."""
    async with toy_stage() as stage, open_lane(stage.address) as lane:
        for number in range(100):
            async with lane.call(toy(f"r{number}", outputs=2, lock_step=True)) as call:
                call.send(row(1))
                await call.receive()
                call.end()
        await until(lambda: stage.engine.alive == 0)

        assert stage.thread.load.aborted_count == 0


async def test_a_request_closed_before_it_was_sent_is_not_sent():
    """Nothing reaches the stage."""
    async with toy_stage() as stage, open_lane(stage.address) as lane:
        lane.call(toy(outputs=5)).close()
        async with lane.call(toy(outputs=1)) as call:
            assert await values(call) == [0.0]

        assert stage.engine.released == 1


@pytest.mark.parametrize(
    ("params", "error"),
    [({"refuse": True}, InvalidRequest), ({"raise_at": 0}, InternalError)],
    ids=["refusal", "bug"],
)
async def test_an_error_of_the_stage_is_raised_with_stage_replica_and_request(params, error):
    """The typed error crosses the wire and names where it happened."""
    async with toy_stage() as stage, open_lane(stage.address) as lane, lane.call(toy("r7", **params)) as call:
        with pytest.raises(error) as caught:
            await values(call)

        assert (caught.value.stage, caught.value.replica, caught.value.request_id) == ("toy", stage.address, "r7")


async def test_a_lost_lane_fails_exactly_the_requests_bound_to_it():
    """When the server goes the call raises StageReplicaLost and the lane ends."""
    async with toy_stage(step_s=0.01) as stage, grpc.aio.insecure_channel(stage.address) as channel:
        lane = Lane(channel, LANE, stage="toy", address=stage.address, router="test")
        await lane.connect()
        carrier = asyncio.create_task(lane.run())
        call = lane.call(toy(outputs=10_000, window=10))
        await call.receive()

        await stage.server.stop(None)

        with pytest.raises(StageReplicaLost) as caught:
            await values(call)
        assert caught.value.stage == "toy"
        with pytest.raises(LaneLost):
            await carrier


async def test_a_stage_drops_the_requests_of_a_lane_that_breaks():
    """The engine has no state left when the router is gone."""
    async with toy_stage(step_s=0.01) as stage:
        async with open_lane(stage.address) as lane:
            call = lane.call(toy(outputs=10_000, window=10))
            await call.receive()
            assert stage.engine.alive == 1

        await until(lambda: stage.engine.alive == 0)


async def test_a_deadline_is_kept_by_the_stage():
    """The stage stops by itself when the time sent with the request has passed."""
    async with toy_stage(step_s=0.01) as stage, open_lane(stage.address) as lane:
        request = toy(outputs=10_000, window=20_000, deadline=time.monotonic() + 0.2)
        async with lane.call(request) as call:
            with pytest.raises(DeadlineExceeded):
                await values(call)
        steps = len(stage.engine.steps)
        await asyncio.sleep(0.1)

        assert len(stage.engine.steps) == steps


async def test_a_full_stage_queue_refuses():
    """One at work, one in line, the third is told so."""
    async with toy_stage(max_queued=1, capacity=1, step_s=0.05) as stage, open_lane(stage.address) as lane:
        calls = [lane.call(toy(f"r{n}", outputs=50, window=100)) for n in range(3)]
        await calls[0].wait_accepted()

        with pytest.raises(QueueFull):
            await calls[2].wait_accepted()
        for call in calls:
            call.close()


async def test_a_draining_stage_finishes_what_it_has_and_refuses_new_requests():
    """Drain lets a running request end and turns a new one away."""
    async with toy_stage(step_s=0.02) as stage, open_lane(stage.address) as lane:
        running = lane.call(toy("old", outputs=10, window=100))
        await running.receive()
        draining = asyncio.create_task(stage.servicer.drain(5))
        await until(lambda: lane.draining)

        with pytest.raises(Draining):
            await lane.call(toy("new")).wait_accepted()
        assert len(await values(running)) == 9
        assert await draining == 0


async def test_a_sleeping_stage_refuses_until_it_is_woken():
    """STAGE_ASLEEP, and after Wake all is as before."""
    async with (
        toy_stage() as stage,
        open_lane(stage.address) as lane,
        grpc.aio.insecure_channel(stage.address) as channel,
    ):
        stub = stage_pb2_grpc.StageServiceStub(channel)
        await stub.Sleep(stage_pb2.SleepRequest(level=1))
        assert stage.engine.asleep
        with pytest.raises(StageAsleep):
            await lane.call(toy()).wait_accepted()

        await stub.Wake(stage_pb2.WakeRequest())

        async with lane.call(toy()) as call:
            assert await values(call) == [0.0]


async def test_credit_keeps_a_stage_from_running_ahead_of_its_reader():
    """With a window of four the engine makes at most four outputs that nobody has read."""
    async with toy_stage() as stage, open_lane(stage.address) as lane:
        async with lane.call(toy(outputs=100, window=4)) as call:
            await call.receive()
            await asyncio.sleep(0.2)
            assert len(stage.engine.steps) <= 1 + 4

            rest = await values(call)

        assert rest == list(range(1, 100))


async def test_a_malformed_input_fails_its_request_and_leaves_the_lane_alone():
    """A wrong shape is refused with what would be right."""
    async with toy_stage() as stage, open_lane(stage.address) as lane:
        bad = lane.call(toy("bad", outputs=9, lock_step=True))
        good = lane.call(toy("good", outputs=3, window=9))
        bad.send({"in": rows_from_numpy(np.zeros((1, 5), np.float32))})

        with pytest.raises(StageProtocolError, match=r"F32 \[5\] where F32 \[4\] is needed"):
            await bad.receive()
        assert await values(good) == [0.0, 1.0, 2.0]


async def test_a_lane_that_does_not_begin_with_open_is_refused():
    """The stage ends the call and serves others."""
    async with toy_stage() as stage, grpc.aio.insecure_channel(stage.address) as channel:
        stream = stage_pb2_grpc.StageServiceStub(channel).Run()
        await stream.write(stage_pb2.RunRequest(abort=stage_pb2.Abort(ids=[1])))
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()

        async with open_lane(stage.address) as lane, lane.call(toy()) as call:
            assert await values(call) == [0.0]


async def test_another_major_protocol_version_is_refused():
    """A router of another major version gets told both versions."""
    async with toy_stage() as stage, grpc.aio.insecure_channel(stage.address) as channel:
        stream = stage_pb2_grpc.StageServiceStub(channel).Run()
        version = stage_pb2.ProtocolVersion(major=2)
        await stream.write(stage_pb2.RunRequest(open=stage_pb2.Open(protocol=version, router="newer")))

        with pytest.raises(grpc.aio.AioRpcError, match=r"1\.0.*2\.0"):
            await stream.read()


async def test_an_engine_that_stands_still_with_work_loses_its_lane():
    """A hang inside a step is noticed although heartbeats go on."""
    settings = LANE.model_copy(update={"engine_stall_s": 0.5})
    async with toy_stage(step_s=3.0) as stage, grpc.aio.insecure_channel(stage.address) as channel:
        lane = Lane(channel, settings, stage="toy", address=stage.address, router="test")
        await lane.connect()
        carrier = asyncio.create_task(lane.run())
        call = lane.call(toy(outputs=2, window=9))

        with pytest.raises(StageReplicaLost, match="stood still"):
            await call.receive()
        with pytest.raises(LaneLost, match="stood still"):
            await carrier


async def test_an_idle_engine_is_not_taken_for_a_hung_one():
    """Without work the step counter may stand."""
    settings = LANE.model_copy(update={"engine_stall_s": 0.3})
    async with toy_stage() as stage, open_lane(stage.address, settings) as lane:
        idle = lane.call(toy(outputs=5, lock_step=True))
        await idle.wait_accepted()
        await asyncio.sleep(1.0)

        idle.send(row(1.0))
        assert await idle.receive() is not None
