"""Streaming, cancel, deadlines, labels and queues, on fake stages whose speed is known."""

import asyncio
import random
import time

import numpy as np
import pytest

from omnistage import (
    AsyncClient,
    DeadlineExceeded,
    NonFiniteOutput,
    OmnistageError,
    QueueFull,
    RemoteError,
    RequestIdInUse,
    StageReplicaLost,
    StageUnavailable,
)
from stage_runtime.testing import expected_pcm

FRAME = 1920


def samples(clip_audio):
    """Samples of f32 audio."""
    return np.frombuffer(clip_audio, np.float32)


def idle(client):
    """Whether router and stages hold nothing."""
    pipelines = client.pipelines()
    loads = [replica for stage in client.stages() for replica in stage.replicas]
    return all(p.in_flight_count == 0 == p.queued_count for p in pipelines) and all(
        r.in_flight_count == 0 and r.load.active_count == 0 == r.load.queued_count for r in loads
    )


def total_aborted(client):
    """Aborts that stages counted."""
    return sum(replica.load.aborted_count for stage in client.stages() for replica in stage.replicas)


async def with_client(system, use):
    """Run `use` with an async client."""
    client = AsyncClient(system.address)
    try:
        return await use(client)
    finally:
        await client.close()


def test_first_audio_leaves_while_later_frames_are_being_made(start_fakes):
    """With 20 ms a frame and 200 frames, chunks arrive over three seconds, the first within half a second."""

    async def arrivals(client, frames):
        started = time.monotonic()
        async with client.stream("x" * frames, voice="ann", seed=1, encoding="f32", timeout_s=60) as stream:
            return [(time.monotonic() - started, chunk.sample_count) async for chunk in stream]

    with start_fakes(acoustic={"step_s": 0.02}) as system:
        long = asyncio.run(with_client(system, lambda client: arrivals(client, 200)))
        short = asyncio.run(with_client(system, lambda client: arrivals(client, 20)))

    assert long[0][0] < 0.5
    assert long[-1][0] - long[0][0] > 3.0
    assert sum(count for _, count in long) == 200 * FRAME
    assert [count // FRAME for _, count in long[:6]] == [5, 5, 5, 5, 5, 25]
    assert long[0][0] <= 1.5 * short[0][0] + 0.05


def test_concurrent_answers_equal_sequential_ones_with_cancels_mixed_in(start_fakes):
    """Twenty-four requests, streamed or not, four of them dropped: every answer is its own."""

    async def one(client, number, cancel):
        text, voice, seed = "word" * (number % 6 + 1), ("ann", "bob")[number % 2], number
        expected = expected_pcm(text, voice, seed, len(text))
        if cancel:
            async with client.stream(text, voice=voice, seed=seed, encoding="f32", timeout_s=60) as stream:
                async for _ in stream:
                    break
        elif number % 3:
            clip = await client.synthesize(text, voice=voice, seed=seed, encoding="f32", timeout_s=60)
            assert np.array_equal(samples(clip.audio), expected)
        else:
            async with client.stream(text, voice=voice, seed=seed, encoding="f32", timeout_s=60) as stream:
                audio = b"".join([chunk.audio async for chunk in stream])
            assert np.array_equal(samples(audio), expected)

    async def all_at_once(client):
        await asyncio.gather(*(one(client, number, number in {3, 9, 14, 20}) for number in range(24)))

    with start_fakes(acoustic={"step_s": 0.002}) as system:
        asyncio.run(with_client(system, all_at_once))
        system.wait(idle)


def test_two_hundred_requests_cancelled_at_random_leave_nothing_behind(start_fakes):
    """In-flight gauges of router and stages return to zero, and the next request is right."""

    async def cancelled(client, rng):
        task = asyncio.ensure_future(client.synthesize("x" * 300, voice="ann", seed=1, timeout_s=60))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def storm(client):
        rng = random.Random(5)
        for _ in range(4):
            await asyncio.gather(*(cancelled(client, rng) for _ in range(50)))
        return await client.synthesize("hello", voice="bob", seed=3, encoding="f32", timeout_s=30)

    with start_fakes(acoustic={"step_s": 0.005}) as system:
        clip = asyncio.run(with_client(system, storm))
        system.wait(idle, 10)

    assert np.array_equal(samples(clip.audio), expected_pcm("hello", "bob", 3, 5))


@pytest.mark.parametrize("how", ["drop", "deadline"])
def test_work_stops_when_the_client_is_gone(start_fakes, how):
    """After a dropped call or a passed deadline the step counters of all stages stand still."""

    async def leave(client):
        if how == "deadline":
            with pytest.raises(DeadlineExceeded):
                await client.synthesize("x" * 400, voice="ann", seed=1, timeout_s=0.5)
        else:
            task = asyncio.ensure_future(client.synthesize("x" * 400, voice="ann", seed=1, timeout_s=60))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.6)
        first = {s.name: s.replicas[0].load.step_count for s in await client.stages()}
        await asyncio.sleep(1.2)
        second = {s.name: s.replicas[0].load.step_count for s in await client.stages()}
        return first, second

    with start_fakes(acoustic={"step_s": 0.05}) as system:
        first, second = asyncio.run(with_client(system, leave))
        system.wait(idle, 5)

    assert second == first
    assert 0 < second["acoustic"] < 40


def test_normal_requests_cause_no_abort(start_fakes):
    """Twenty requests that end well are aborted nowhere."""

    async def twenty(client):
        for number in range(20):
            await client.synthesize("short", voice="ann", seed=number, timeout_s=30)

    with start_fakes() as system:
        asyncio.run(with_client(system, twenty))
        system.wait(idle)
        system.wait(lambda client: total_aborted(client) == 0, 3)


def test_a_label_in_use_is_refused_and_free_again_afterwards(start_fakes):
    """ALREADY_EXISTS while the first request with it runs."""

    async def twice(client):
        first = asyncio.ensure_future(
            client.synthesize("x" * 50, voice="ann", seed=1, client_request_id="mine", timeout_s=30)
        )
        await asyncio.sleep(0.3)
        with pytest.raises(RequestIdInUse, match="mine"):
            await client.synthesize("y", voice="ann", seed=1, client_request_id="mine", timeout_s=30)
        clip = await first
        await client.synthesize("y", voice="ann", seed=1, client_request_id="mine", timeout_s=30)
        return clip

    with start_fakes(acoustic={"step_s": 0.02}) as system:
        clip = asyncio.run(with_client(system, twice))

    assert clip.result.client_request_id == "mine"


def test_a_full_queue_refuses_at_once_and_accepted_requests_finish(start_fakes):
    """Two at work and eight in line: of sixty at once ten succeed, the rest get RESOURCE_EXHAUSTED with a delay."""

    def small(settings):
        settings["pipelines"]["speech"] |= {"max_concurrent": 2, "max_queued": 8}
        return settings

    async def burst(client):
        started = time.monotonic()
        refused_after = []

        async def one(number):
            try:
                return await client.synthesize("x" * 10, voice="ann", seed=number, timeout_s=60)
            except QueueFull as error:
                refused_after.append(time.monotonic() - started)
                return error

        results = await asyncio.gather(*(one(number) for number in range(60)))
        refusals = [result for result in results if isinstance(result, QueueFull)]
        assert all(refusal.retry_after_s for refusal in refusals)
        return [result for result in results if not isinstance(result, QueueFull)], refused_after

    with start_fakes(small, acoustic={"step_s": 0.02}) as system:
        accepted, refused_after = asyncio.run(with_client(system, burst))
        system.wait(idle)

    assert 10 <= len(accepted) <= 11
    assert max(refused_after) < 1.0


def test_expired_requests_in_line_are_never_run(start_fakes):
    """Ten requests with half a second behind a two-second one cost the stages nothing."""

    def single(settings):
        settings["pipelines"]["speech"] |= {"max_concurrent": 1}
        return settings

    async def queue(client):
        long = asyncio.ensure_future(client.synthesize("x" * 40, voice="ann", seed=1, timeout_s=30))
        await asyncio.sleep(0.2)
        late = [client.synthesize("y" * 40, voice="ann", seed=2, timeout_s=0.5) for _ in range(10)]
        results = await asyncio.gather(*late, return_exceptions=True)
        await long
        await asyncio.sleep(0.7)
        stages = {stage.name: stage.replicas[0].load for stage in await client.stages()}
        return results, stages

    with start_fakes(single, acoustic={"step_s": 0.05}) as system:
        results, stages = asyncio.run(with_client(system, queue))

    assert all(isinstance(result, DeadlineExceeded) for result in results)
    assert stages["acoustic"].row_count == 41


FAULTS = {
    "acoustic raises": ("acoustic", {"how": "raise", "step": 3, "times": 1}, "INTERNAL"),
    "thinker NaN": ("thinker", {"how": "nan", "step": 2, "times": 1}, "NON_FINITE_OUTPUT"),
    "codec NaN": ("codec", {"how": "nan", "step": 1, "times": 1}, "NON_FINITE_OUTPUT"),
    "codec out of memory": ("codec", {"how": "out_of_memory", "step": 1, "times": 1}, "STAGE_OUT_OF_MEMORY"),
    "acoustic wrong shape": ("acoustic", {"how": "bad_shape", "step": 2, "times": 1}, "STAGE_REPLICA_LOST"),
    "codec too few samples": ("codec", {"how": "bad_shape", "step": 1, "times": 1}, "STAGE_PROTOCOL_ERROR"),
    "acoustic dies": ("acoustic", {"how": "exit", "step": 20, "times": 1}, "STAGE_REPLICA_LOST"),
}


@pytest.mark.parametrize(("stage", "fault", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_fault_fails_the_request_with_its_stage_named_and_the_next_one_is_right(start_fakes, stage, fault, reason):
    """Partial chunks arrive, then the typed error; nothing hangs; the state afterwards is clean."""

    async def provoke(client):
        chunks = []
        try:
            async with client.stream("x" * 30, voice="ann", seed=1, encoding="f32", timeout_s=20) as stream:
                async for chunk in stream:
                    chunks.append(chunk)  # noqa: PERF401  # those before the error are wanted
        except OmnistageError as error:
            return chunks, error
        raise AssertionError("the fault went unnoticed")

    async def again(client):
        return await client.synthesize("x" * 12, voice="ann", seed=2, encoding="f32", timeout_s=20)

    with start_fakes(**{stage: {"fault": fault}}) as system:
        chunks, error = asyncio.run(with_client(system, provoke))
        if fault["how"] == "exit":
            system.processes[f"{stage}0"].wait(5)
            system.start_stage(stage)
        system.wait_serving()
        clip = asyncio.run(with_client(system, again))
        system.wait(idle)

    assert error.reason == reason, error
    assert error.request_id
    assert error.stage == stage or reason == "STAGE_PROTOCOL_ERROR"
    if stage == "codec":
        assert sum(chunk.sample_count for chunk in chunks) == 5 * FRAME
    assert np.array_equal(samples(clip.audio), expected_pcm("x" * 12, "ann", 2, 12))
    assert not isinstance(error, RemoteError)


def test_a_missing_stage_is_told_at_admission_and_used_when_it_is_there(start_fakes):
    """STAGE_UNAVAILABLE names the stage; the router serves when it comes back, without being touched."""

    async def refused(client):
        with pytest.raises(StageUnavailable) as caught:
            await client.synthesize("hello", voice="ann", seed=1, timeout_s=10)
        return caught.value

    with start_fakes() as system:
        system.processes["codec0"].kill()
        system.processes["codec0"].wait()
        system.wait(lambda client: client.health("stage/codec") == "NOT_SERVING", 5)
        error = asyncio.run(with_client(system, refused))
        system.start_stage("codec")
        system.wait_serving()
        clip = asyncio.run(
            with_client(system, lambda c: c.synthesize("hello", voice="ann", seed=1, encoding="f32", timeout_s=10))
        )

    assert error.stage == "codec"
    assert error.retry_after_s
    assert np.array_equal(samples(clip.audio), expected_pcm("hello", "ann", 1, 5))


def test_a_killed_replica_fails_its_requests_and_the_router_lives_on(start_fakes):
    """STAGE_REPLICA_LOST within a second, naming stage and replica."""

    async def use(client, system):
        stream = client.stream("x" * 500, voice="ann", seed=1, timeout_s=60)  # streams are not tried again
        await anext(stream)
        system.processes["thinker0"].kill()
        killed = time.monotonic()
        with pytest.raises(StageReplicaLost) as caught:
            [chunk async for chunk in stream]
        return time.monotonic() - killed, caught.value

    with start_fakes(acoustic={"step_s": 0.02}) as system:
        seconds, error = asyncio.run(with_client(system, lambda client: use(client, system)))
        assert system.processes["router"].poll() is None

    assert seconds < 1.0
    assert error.stage == "thinker"
    assert "thinker0.sock" in error.replica
    assert not isinstance(error, NonFiniteOutput)
