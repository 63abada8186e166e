"""Layout of rows in fixed row counts."""

from __future__ import annotations

import pytest
import torch

from services.acoustic.batching import RowSpec, at_most, in_blocks, invariant_sizes, split_rows

SPECS = (RowSpec((2,), torch.float32, float("nan")), RowSpec((), torch.bool, 1))


class Recorder:
    """A row function (doubles its first input, negates the second) that notes the row counts it is called with."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, values: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.counts.append(len(values))
        assert len(flags) == len(values)
        return values * 2, ~flags


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [(0, 1, 1)]),
        (2, [(0, 2, 2)]),
        (3, [(0, 3, 4)]),
        (5, [(0, 5, 8)]),
        (9, [(0, 9, 16)]),
        (17, [(0, 17, 32)]),
        (32, [(0, 32, 32)]),
        (33, [(0, 32, 32), (32, 1, 1)]),
        (71, [(0, 32, 32), (32, 32, 32), (64, 7, 8)]),
    ],
)
def test_batches_are_rounded_up_to_a_size_or_split(count: int, expected: list[tuple[int, int, int]]) -> None:
    """The smallest size that holds the rows is taken; above the largest, the largest and then what is left."""
    blocks = split_rows(count, (1, 2, 4, 8, 16, 32))

    assert [(block.start, block.count, block.size) for block in blocks] == expected


@pytest.mark.parametrize("count", range(1, 12))
def test_padding_rows_do_not_reach_the_output(count: int) -> None:
    """Whatever the number of rows, the output has these rows alone, in order, and the function saw the fixed sizes only."""
    function = Recorder()
    values = torch.arange(count * 2.0).view(count, 2)
    flags = torch.arange(count) % 2 == 0

    doubled, negated = in_blocks(function, SPECS, (2, 4))(values, flags)

    assert torch.equal(doubled, values * 2)
    assert torch.equal(negated, ~flags)
    assert set(function.counts) <= {2, 4}


def test_blocks_are_copies_even_if_full() -> None:
    """The function never gets a view of the caller's batch, whose alignment would depend on the batch."""
    values, flags = torch.ones(4, 2), torch.ones(4, dtype=torch.bool)
    seen: list[int] = []

    def function(rows: torch.Tensor, _flags: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(rows.data_ptr())
        return (rows,)

    in_blocks(function, SPECS, (2,))(values, flags)

    assert len(seen) == 2
    assert not set(seen) & {values.data_ptr(), values[2:].data_ptr()}


def test_calls_are_limited_without_padding() -> None:
    """A limit of rows splits a batch and pads nothing."""
    function = Recorder()
    values, flags = torch.arange(14.0).view(7, 2), torch.ones(7, dtype=torch.bool)

    doubled, _ = at_most(function, 3)(values, flags)

    assert function.counts == [3, 3, 1]
    assert torch.equal(doubled, values * 2)


def by_count(rule: dict[int, float]) -> object:
    """A function whose result changes by rule[count]."""
    return lambda values: (values + rule.get(len(values), 0.0),)


PROBES = [(torch.ones(1, 2),), (torch.full((1, 2), 3.0),)]


def test_all_doubles_with_the_same_bits_are_found() -> None:
    """Row counts that give other bits than the first are left out; those after them are still tried."""
    sizes = invariant_sizes(by_count({8: 1e-3}), PROBES, first=4, limit=40, several=True)

    assert sizes == (4, 16, 32)


def test_one_size_is_enough_where_several_are_not_wanted() -> None:
    """Without `several` only the first row count whose places agree is taken."""
    assert invariant_sizes(by_count({}), PROBES, first=4, limit=32, several=False) == (4,)


def test_sizes_whose_places_disagree_are_not_used() -> None:
    """A row count at which the last place gets other bits is skipped, as some kernels treat the last rows apart."""

    def function(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = values.clone()
        if len(values) < 8:
            result[-1] += 1e-3
        return (result,)

    assert invariant_sizes(function, PROBES, first=2, limit=32, several=True) == (8, 16, 32)


def test_one_row_at_a_time_is_the_last_resort() -> None:
    """If the places agree nowhere, rows are computed alone."""

    def function(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (values + torch.arange(len(values))[:, None],)

    assert invariant_sizes(function, PROBES, first=2, limit=32, several=True) == (1,)


def test_every_output_and_every_probe_counts() -> None:
    """A difference in one output of one probe is enough to leave a row count out."""

    def function(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values, values + (1e-3 if len(values) == 8 and values[0, 0] == 3 else 0.0)

    assert invariant_sizes(function, PROBES, first=4, limit=16, several=True) == (4, 16)
