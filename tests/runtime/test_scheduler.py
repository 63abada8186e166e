"""Continuous batching, isolation of failures, deadlines and credit, on the toy engine without threads or sockets."""

import numpy as np
import pytest

from stage_runtime.engine import StageRequest
from stage_runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NonFiniteOutput,
    QueueFull,
    StageOutOfMemory,
)
from stage_runtime.scheduler import Accepted, Failed, Finished, InputRow, Key, Output, Scheduler, Submission
from stage_runtime.tensors import rows_from_numpy
from stage_runtime.testing import ToyEngine, ToyParams, ToySettings


class Bench:
    """A scheduler over a toy engine with a hand-driven clock."""

    def __init__(self, max_queued=8, **settings):
        self.now = 0.0
        self.events = []
        self.engine = ToyEngine(ToySettings(**settings))
        self.scheduler = Scheduler(self.engine, max_queued=max_queued, emit=self.events.append, clock=lambda: self.now)

    def submit(self, number, *, credit=100, deadline=None, **params):
        request = StageRequest(f"r{number}", ToyParams(**params).to_struct())
        self.scheduler.submit(Submission(Key(0, number), request, deadline, credit))

    def give(self, number, index, value):
        rows = {"in": rows_from_numpy(np.full((1, 4), value, np.float32))}
        self.scheduler.give(Key(0, number), InputRow(index, rows))

    def run(self, limit=1000):
        for _ in range(limit):
            if not self.scheduler.tick():
                return
            self.scheduler.step()
        raise AssertionError("the scheduler does not come to rest")

    def outputs(self, number):
        found = []
        for event in self.events:
            if isinstance(event, Output) and Key(0, number) in event.keys:
                place = event.keys.index(Key(0, number))
                found.append((event.indices[place], float(event.tensors["out"].numpy()[place][1])))
        return found

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def test_requests_that_arrive_together_share_steps():
    """Four requests of three outputs take three engine steps."""
    bench = Bench(capacity=4)
    for number in range(4):
        bench.submit(number, outputs=3)

    bench.run()

    assert bench.engine.steps == [4, 4, 4]
    assert [bench.outputs(number) for number in range(4)] == [[(0, 0.0), (1, 1.0), (2, 2.0)]] * 4
    assert len(bench.of(Finished)) == 4
    assert bench.engine.alive == 0


def test_new_requests_join_between_steps():
    """A request submitted during another's run is in the very next step."""
    bench = Bench(capacity=4)
    bench.submit(1, outputs=5)
    assert bench.scheduler.tick()
    bench.scheduler.step()
    bench.submit(2, outputs=2)

    bench.run()

    assert bench.engine.steps == [1, 2, 2, 1, 1]


def test_more_requests_than_capacity_wait_and_all_finish_in_order():
    """Capacity bounds the batch; who waits is admitted first come, first served."""
    bench = Bench(capacity=2, max_queued=8)
    for number in range(6):
        bench.submit(number, outputs=2)

    bench.run()

    assert max(bench.engine.steps) == 2
    assert [event.key.id for event in bench.of(Accepted)] == list(range(6))
    assert len(bench.of(Finished)) == 6


def test_a_full_queue_refuses_at_once_and_keeps_what_it_has():
    """Capacity 2 and queue 3 take five of seven requests; the others get QueueFull with a delay."""
    bench = Bench(capacity=2, max_queued=3)
    for number in range(7):
        bench.submit(number)

    refused = bench.of(Failed)
    assert [event.key.id for event in refused] == [5, 6]
    assert all(isinstance(event.error, QueueFull) and event.error.retry_after_s for event in refused)
    assert bench.scheduler.load().queued == 3
    bench.run()
    assert len(bench.of(Finished)) == 5
    assert bench.scheduler.load().queued == bench.scheduler.load().active == 0


def test_a_request_that_cannot_be_admitted_now_waits_for_room():
    """CannotAdmitNow keeps a request in line until another has ended."""
    bench = Bench(capacity=4, room=1)
    bench.submit(1, outputs=2)
    bench.submit(2, outputs=1)

    bench.run()

    assert bench.engine.steps == [1, 1, 1]
    assert [event.key.id for event in bench.of(Finished)] == [1, 2]


def test_requests_of_different_batch_keys_never_share_a_step():
    """Two keys alternate, neither starves."""
    bench = Bench(capacity=8)
    for number in range(6):
        bench.submit(number, outputs=2, key="even" if number % 2 == 0 else "odd")

    bench.run()

    assert bench.engine.steps == [3, 3, 3, 3]
    steps = [{key.id % 2 for key in event.keys} for event in bench.of(Output)]
    assert steps == [{0}, {1}, {0}, {1}]


def test_an_exception_fails_only_the_request_at_fault():
    """The batch is split until the culprit stands alone; the others give what they would have given."""
    bench = Bench(capacity=8)
    for number in range(7):
        bench.submit(number, outputs=3, raise_at=1 if number == 3 else -1)

    bench.run()

    failed = bench.of(Failed)
    assert [event.key.id for event in failed] == [3]
    assert isinstance(failed[0].error, InternalError)
    assert failed[0].error.request_id == "r3"
    assert all(len(bench.outputs(number)) == 3 for number in range(7) if number != 3)
    assert bench.engine.alive == 0


def test_a_nan_fails_only_its_own_request():
    """NON_FINITE_OUTPUT names tensor and step, and the poisoned row is not sent."""
    bench = Bench(capacity=4)
    for number in range(3):
        bench.submit(number, outputs=3, nan_at=1 if number == 1 else -1)

    bench.run()

    (failed,) = bench.of(Failed)
    assert failed.key.id == 1
    assert isinstance(failed.error, NonFiniteOutput)
    assert failed.error.metadata["step"] == "1"
    assert bench.outputs(1) == [(0, 0.0)]
    assert bench.outputs(0) == bench.outputs(2) == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_out_of_memory_halves_the_batch_until_it_fits():
    """Eight rows do not fit, four neither, two do: all requests succeed and caches were given back each time."""
    bench = Bench(capacity=8)
    for number in range(8):
        bench.submit(number, outputs=1, out_of_memory_rows=3)

    bench.run()

    assert bench.engine.steps == [2, 2, 2, 2]
    assert bench.engine.recovered == 3
    assert len(bench.of(Finished)) == 8


def test_a_request_that_does_not_fit_alone_fails_alone():
    """STAGE_OUT_OF_MEMORY goes to the one request that needs too much."""
    bench = Bench(capacity=4)
    bench.submit(1, out_of_memory_rows=1)
    bench.submit(2)

    bench.run()

    (failed,) = bench.of(Failed)
    assert failed.key.id == 1
    assert isinstance(failed.error, StageOutOfMemory)
    assert [event.key.id for event in bench.of(Finished)] == [2]


def test_a_refusal_reaches_its_request_and_nobody_else():
    """An engine's typed refusal is passed on as it is."""
    bench = Bench()
    bench.submit(1, refuse=True)
    bench.submit(2)

    bench.run()

    (failed,) = bench.of(Failed)
    assert (failed.key.id, type(failed.error)) == (1, InvalidRequest)
    assert len(bench.of(Finished)) == 1


def test_aborted_requests_take_part_in_no_further_step():
    """Abort drops a running and a waiting request before the next step and says nothing."""
    bench = Bench(capacity=2)
    for number in range(3):
        bench.submit(number, outputs=4)
    bench.scheduler.tick()
    bench.scheduler.step()

    bench.scheduler.abort(Key(0, 0))
    bench.scheduler.abort(Key(0, 2))
    bench.run()

    assert bench.engine.steps == [2, 1, 1, 1]
    assert bench.of(Failed) == []
    assert bench.scheduler.load().aborted_count == 2
    assert bench.engine.alive == 0


def test_finished_requests_are_not_counted_as_aborted():
    """An abort that comes after the end changes nothing."""
    bench = Bench()
    bench.submit(1)
    bench.run()

    bench.scheduler.abort(Key(0, 1))

    assert bench.scheduler.load().aborted_count == 0
    assert bench.engine.released == 1


def test_expired_requests_are_dropped_without_being_run():
    """What expired in the queue never reaches the engine; what expired at work stops before its next step."""
    bench = Bench(capacity=1)
    bench.submit(1, outputs=10, deadline=5.0)
    bench.submit(2, outputs=1, deadline=2.0)
    bench.scheduler.tick()
    bench.scheduler.step()

    bench.now = 3.0
    bench.scheduler.tick()
    bench.scheduler.step()
    bench.now = 6.0
    bench.run()

    assert bench.engine.steps == [1, 1]
    assert [event.key.id for event in bench.of(Failed)] == [2, 1]
    assert all(isinstance(event.error, DeadlineExceeded) for event in bench.of(Failed))
    assert [event.key.id for event in bench.of(Accepted)] == [1]


def test_lock_step_requests_wait_for_their_input():
    """A state without input is not ready; each input leads to one output made from it."""
    bench = Bench()
    bench.submit(1, outputs=3, lock_step=True, credit=1)
    bench.run()
    assert bench.engine.steps == []

    for index, value in enumerate((10.0, 20.0, 30.0)):
        bench.give(1, index, value)
        bench.run()

    assert bench.outputs(1) == [(0, 11.0), (1, 21.0), (2, 31.0)]
    assert len(bench.of(Finished)) == 1


@pytest.mark.parametrize("index", [1, 7], ids=["too early", "far off"])
def test_input_out_of_order_fails_the_request(index):
    """A lost or doubled input is noticed instead of giving another result."""
    bench = Bench()
    bench.submit(1, outputs=3, lock_step=True)
    bench.submit(2)

    bench.give(1, index, 1.0)
    bench.run()

    (failed,) = bench.of(Failed)
    assert failed.error.reason == "STAGE_PROTOCOL_ERROR"
    assert len(bench.of(Finished)) == 1


def test_credit_bounds_how_far_a_request_runs_ahead():
    """With credit for two outputs a free-running request stops there and goes on when it gets more."""
    bench = Bench()
    bench.submit(1, outputs=5, credit=2)
    bench.run()
    assert len(bench.outputs(1)) == 2

    bench.scheduler.credit(Key(0, 1), 3)
    bench.run()

    assert len(bench.outputs(1)) == 5
    assert len(bench.of(Finished)) == 1


def test_end_of_input_finishes_a_request_when_its_input_is_used_up():
    """End waits for the inputs given before it."""
    bench = Bench()
    bench.submit(1, outputs=9, lock_step=True, credit=1)
    bench.give(1, 0, 1.0)
    bench.give(1, 1, 2.0)
    bench.scheduler.end(Key(0, 1))

    bench.run()

    assert len(bench.outputs(1)) == 2
    assert len(bench.of(Finished)) == 1
    assert bench.scheduler.load().aborted_count == 0


def test_input_and_end_that_overtake_admission_are_kept():
    """A request still waiting for room gets the input and the end that were sent for it."""
    bench = Bench(capacity=4, room=1)
    bench.submit(1, outputs=1)
    bench.submit(2, outputs=9, lock_step=True, credit=1)
    bench.give(2, 0, 5.0)
    bench.scheduler.end(Key(0, 2))

    bench.run()

    assert bench.outputs(2) == [(0, 6.0)]
    assert [event.key.id for event in bench.of(Finished)] == [1, 2]


def test_losing_a_lane_drops_its_requests_only():
    """Requests of another lane go on."""
    bench = Bench(capacity=4)
    bench.submit(1, outputs=3)
    other = StageRequest("other", ToyParams(outputs=3).to_struct())
    bench.scheduler.submit(Submission(Key(1, 1), other, None, 100))
    bench.scheduler.tick()
    bench.scheduler.step()

    bench.scheduler.abort_lane(0)
    bench.run()

    assert [event.key for event in bench.of(Finished)] == [Key(1, 1)]
    assert bench.engine.alive == 0
