"""The graph wrapper at every batch size, with a back end that has CUDA's contract (static buffers, replays) on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.acoustic.batching import RowSpec, in_blocks, split_rows
from services.acoustic.decoder import input_specs
from services.acoustic.graphs import BucketedGraphs, HostCapture
from services.acoustic.model import AcousticHead

BUCKETS = (1, 2, 4, 8, 16, 32)
Tensors = tuple[torch.Tensor, ...]
MakeInputs = Callable[..., Tensors]
Events = Callable[[], list[dict[str, object]]]


class Faulty(HostCapture):
    """A back end that fails at chosen moments, by call number."""

    def __init__(
        self, *, warm_up: int | None = None, captures: set[int] = frozenset(), replay: int | None = None
    ) -> None:
        super().__init__()
        self.warm_ups = self.captures_done = self.replays = 0
        self._warm_up, self._captures, self._replay = warm_up, captures, replay

    def warm_up(self, run: Callable[[], Tensors]) -> None:
        self.warm_ups += 1
        if self.warm_ups == self._warm_up:
            raise RuntimeError("no kernel image is available")
        super().warm_up(run)

    def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        self.captures_done += 1
        if self.captures_done in self._captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        replay, outputs = super().capture(run)

        def counted() -> None:
            self.replays += 1
            if self.replays == self._replay:
                raise RuntimeError("an illegal memory access was encountered")
            replay()

        return counted, outputs


def captured(head: AcousticHead, backend: HostCapture | None = None, **options: object) -> BucketedGraphs:
    """A wrapper of the head's frames, warmed up."""
    graphs = BucketedGraphs(
        head.frames, options.pop("specs", input_specs(head)), BUCKETS, backend or HostCapture(), **options
    )
    graphs.warm_up()
    return graphs


def assert_same(left: Tensors, right: Tensors) -> None:
    """All outputs have the same bits."""
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", range(1, 41))
def test_every_batch_equals_the_eager_run_of_the_same_padded_batch(
    head: AcousticHead, make_inputs: MakeInputs, count: int
) -> None:
    """For 1 to 40 rows with mixed guidance all bits equal the padded eager run, codes the unpadded one, and counters fit."""
    graphs = captured(head)
    inputs = make_inputs(head, count)

    replayed = graphs(*inputs)

    assert_same(replayed, in_blocks(head.frames, input_specs(head), BUCKETS)(*inputs))
    plain = head.frames(*inputs)
    assert torch.equal(replayed[0], plain.codes)
    torch.testing.assert_close(replayed[1], plain.latents, atol=1e-5, rtol=0)
    blocks = split_rows(count, BUCKETS)
    assert sorted(graphs.counters.replays.elements()) == sorted(block.size for block in blocks)
    assert graphs.counters.eager_calls == 0
    assert graphs.counters.padding_rows == sum(block.size for block in blocks) - count


@pytest.mark.parametrize("count", [1, 3, 5, 17, 31, 33, 37])
def test_poisoned_padding_rows_do_not_reach_outputs(head: AcousticHead, make_inputs: MakeInputs, count: int) -> None:
    """NaN in every padding row changes no bit of the real rows, and all outputs are finite."""
    poison = [RowSpec(s.shape, s.dtype, float("nan") if s.dtype.is_floating_point else 1) for s in input_specs(head)]
    inputs = make_inputs(head, count)

    poisoned = captured(head, specs=poison)(*inputs)

    assert_same(poisoned, captured(head)(*inputs))
    assert poisoned[1].isfinite().all()
    assert poisoned[2].all()


def test_outputs_do_not_alias_static_buffers(head: AcousticHead, make_inputs: MakeInputs) -> None:
    """Outputs of a call stay as they are when the same bucket is replayed with other rows."""
    graphs = captured(head)
    first = graphs(*make_inputs(head, 3, seed=1))
    kept = tuple(output.clone() for output in first)

    second = graphs(*make_inputs(head, 4, seed=2))

    assert_same(first, kept)
    assert not torch.equal(second[1][:3], first[1])


def test_rows_of_an_earlier_call_leave_no_trace(head: AcousticHead, make_inputs: MakeInputs) -> None:
    """A small batch after a large one in the same bucket gives the bits it gives in a fresh wrapper."""
    used, fresh = captured(head), captured(head)
    used(*(torch.full_like(rows, float("nan")) if rows.is_floating_point() else rows for rows in make_inputs(head, 8)))

    assert_same(used(*make_inputs(head, 5)), fresh(*make_inputs(head, 5)))


def test_nothing_is_replayed_inside_another_capture(head: AcousticHead, make_inputs: MakeInputs) -> None:
    """While the current stream is being captured calls are eager and counted so; afterwards they are replays again."""
    capturing = False
    graphs = captured(head, HostCapture(lambda: capturing))
    inputs = make_inputs(head, 5)

    capturing = True
    inside = graphs(*inputs)
    assert not graphs.counters.replays
    assert graphs.counters.eager_calls == 1
    capturing = False
    graphs(*inputs)

    assert_same(inside, head.frames(*inputs))
    assert graphs.counters.replays == {8: 1}


def test_a_bucket_that_cannot_be_captured_is_left_out(
    head: AcousticHead, make_inputs: MakeInputs, events: Events
) -> None:
    """The next larger bucket serves in its place; one warning names it and the reason."""
    graphs = captured(head, Faulty(captures={3}))
    inputs = make_inputs(head, 3)

    replayed = graphs(*inputs)

    assert graphs.captured == (1, 2, 8, 16, 32)
    assert graphs.counters.replays == {8: 1}
    assert_same(replayed, in_blocks(head.frames, input_specs(head), (8,))(*inputs))
    (log,) = events()
    assert (log["event"], log["level"]) == ("graph_buckets_left_out", "warning")
    assert log["failures"] == {"4": "operation not permitted when stream is capturing"}


def test_without_the_largest_bucket_batches_are_split_over_the_others(
    head: AcousticHead, make_inputs: MakeInputs
) -> None:
    """When 32 rows cannot be captured, 33 rows are two replays of 16 and one of 1."""
    graphs = captured(head, Faulty(captures={6}))

    graphs(*make_inputs(head, 33))

    assert graphs.counters.replays == {16: 2, 1: 1}


@pytest.mark.parametrize(
    "backend",
    [Faulty(warm_up=2), Faulty(captures={1, 2, 3, 4, 5, 6}), Faulty(replay=2)],
    ids=["warm-up", "all captures", "replay"],
)
def test_any_other_failure_means_eager_calls_and_one_warning(
    head: AcousticHead, make_inputs: MakeInputs, events: Events, backend: Faulty
) -> None:
    """After a failure in warm-up, all captures or a replay, calls give the eager result, with one warning in all."""
    inputs = make_inputs(head, 5)
    graphs = captured(head, backend)
    results = [graphs(*inputs) for _ in range(3)]

    assert graphs.captured == ()
    assert_same(results[1], head.frames(*inputs))
    assert_same(results[2], head.frames(*inputs))
    assert graphs.counters.eager_calls >= 2
    (log,) = events()
    assert (log["event"], log["level"]) == ("graphs_disabled", "warning")
    assert log["reason"]


def test_the_fallback_computes_what_cannot_be_replayed(head: AcousticHead, make_inputs: MakeInputs) -> None:
    """An eager function given apart, such as one with fixed row counts, is used for the fallback."""
    eager = in_blocks(head.frames, input_specs(head), (8,))
    graphs = captured(head, HostCapture(lambda: True), eager=eager)
    inputs = make_inputs(head, 3)

    assert_same(graphs(*inputs), eager(*inputs))


def test_before_warm_up_calls_are_eager(head: AcousticHead, make_inputs: MakeInputs) -> None:
    """A wrapper that was not warmed up calls the function."""
    graphs = BucketedGraphs(head.frames, input_specs(head), BUCKETS, HostCapture())
    inputs = make_inputs(head, 2)

    assert_same(graphs(*inputs), head.frames(*inputs))
    assert graphs.counters.eager_calls == 1


def test_a_second_warm_up_is_ignored_with_a_warning(head: AcousticHead, events: Events) -> None:
    """Warming up again captures nothing and says so."""
    backend = Faulty()
    graphs = captured(head, backend)

    graphs.warm_up()

    assert backend.captures_done == len(BUCKETS)
    assert [(log["event"], log["level"]) for log in events()] == [("graphs_already_captured", "warning")]


def test_all_sizes_run_before_the_first_capture(head: AcousticHead) -> None:
    """Every bucket is run eagerly before any is captured, and once more right before its own capture."""
    events: list[str] = []

    class Noting(HostCapture):
        def warm_up(self, run: Callable[[], Tensors]) -> None:
            events.append("run")
            super().warm_up(run)

        def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
            events.append("capture")
            return super().capture(run)

    captured(head, Noting())

    assert events == ["run"] * 6 + ["run", "capture"] * 6
