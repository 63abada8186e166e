"""Row counts of decode passes.

Matrix kernels choose their order of summation by the number of rows, so the last bits of a row depend on how many rows share the
pass. With `batch_invariant` a pass therefore has one of few row counts, all found at start to give a row the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

# Above this the row counts after the first are not tried: the check would delay the start for little.
_SLOW_CHECK_S = 1.0


def split_rows(items: Sequence[T], sizes: Sequence[int]) -> Iterator[tuple[Sequence[T], int]]:
    """Parts of `items` and the row count of each part's pass: the smallest of the sorted `sizes` that holds what is left."""
    start = 0
    while start < len(items):
        left = len(items) - start
        size = next((size for size in sizes if size >= left), sizes[-1])
        yield items[start : start + size], size
        start += size


def invariant_sizes(run: Callable[[int], torch.Tensor], *, first: int, limit: int, several: bool) -> tuple[int, ...]:
    """Row counts at which a row gets the same bits, whichever the count and whichever the row's place.

    Tries `first` and its doubles, up to the first that holds `limit` rows. Kernels fix their order of summation by shape, not by
    value, and a whole model adds up enough numbers for another order to show.

    Args:
        run: Runs a pass of so many rows, equal ones; gives the results of those in use, at most `limit`.
        first: Row count to begin with.
        limit: Most rows in use.
        several: False to stop at the first row count whose places agree.

    Returns:
        Sorted row counts, at least one; (1,), which cannot fail, if at none of them the places agree.
    """
    sizes: list[int] = []
    reference: torch.Tensor | None = None
    for size in _doubles(first, limit):
        begin = time.perf_counter()
        result = run(size)
        expected = result[:1] if reference is None else reference
        if bool((result == expected).all()):
            sizes.append(size)
            reference = expected
            if not several or time.perf_counter() - begin > _SLOW_CHECK_S:
                break
    return tuple(sizes) or (1,)


def _doubles(first: int, limit: int) -> Iterator[int]:
    size = first
    while size < limit:
        yield size
        size *= 2
    yield size
