"""How rows of a batch are laid out in fixed row counts: blocks, padding, and which row counts give the same bits.

A model function here takes tensors with one row for each request along axis 0, gives such tensors, and computes each row from that
row alone. Matrix kernels nevertheless choose their order of summation by the number of rows, so that the last bits of a row depend on
how many rows there are, and in some kernels on which of them it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, ...]
RowFunction = Callable[..., Tensors]

# Above this the row counts after the first are not tried: the check would delay the start by minutes for little.
_SLOW_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One input of a model function: shape and dtype of a row, and the value that padding rows are filled with."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float

    def rows(self, count: int, device: torch.device) -> torch.Tensor:
        """A tensor of `count` padding rows."""
        return torch.full((count, *self.shape), self.fill, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows start to start + count of a batch, computed as a batch of `size` rows."""

    start: int
    count: int
    size: int


def split_rows(count: int, sizes: Sequence[int]) -> list[Block]:
    """Blocks that cover `count` rows: the smallest size that holds all that are left, else the largest and go on.

    `sizes` is sorted and not empty.
    """
    blocks: list[Block] = []
    start = 0
    while start < count:
        left = count - start
        size = next((size for size in sizes if size >= left), sizes[-1])
        blocks.append(Block(start, min(left, size), size))
        start += size
    return blocks


def join(parts: Sequence[Tensors]) -> Tensors:
    """The outputs of several blocks, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def in_blocks(function: RowFunction, specs: Sequence[RowSpec], sizes: Sequence[int]) -> RowFunction:
    """`function`, but always called with one of the row counts `sizes`; padding rows never reach the output."""

    def call(*inputs: torch.Tensor) -> Tensors:
        parts: list[Tensors] = []
        for block in split_rows(inputs[0].shape[0], sizes):
            # Copied even if full: a view into the batch may be aligned otherwise, and kernels look at alignment.
            padded = [spec.rows(block.size, tensor.device) for spec, tensor in zip(specs, inputs, strict=True)]
            for rows, tensor in zip(padded, inputs, strict=True):
                rows[: block.count] = tensor[block.start : block.start + block.count]
            parts.append(tuple(output[: block.count] for output in function(*padded)))
        return join(parts)

    return call


def at_most(function: RowFunction, limit: int) -> RowFunction:
    """`function`, but never called with more than `limit` rows."""

    def call(*inputs: torch.Tensor) -> Tensors:
        count = inputs[0].shape[0]
        if count <= limit:
            return function(*inputs)
        return join([function(*(t[at : at + limit] for t in inputs)) for at in range(0, count, limit)])

    return call


def invariant_sizes(
    function: RowFunction, probes: Sequence[Tensors], *, first: int, limit: int, several: bool
) -> tuple[int, ...]:
    """Row counts at which `function` gives a row the same bits, whichever the count and whichever the row's place.

    Tries `first` and its doubles up to `limit` by filling every place with the same row. Kernels fix their order of summation by
    shape, not by value, and a whole model adds up enough numbers for another order to show.

    Args:
        function: The model.
        probes: Inputs of one row each.
        first: Row count to begin with, 1 to `limit`.
        limit: Largest row count.
        several: False to stop at the first row count whose places agree.

    Returns:
        Sorted row counts, at least one; (1,), which cannot fail, if at none of them the places agree.
    """
    sizes: list[int] = []
    reference: list[Tensors] = []
    size = first
    while size <= limit:
        begin = time.perf_counter()
        results = [function(*(tensor.expand(size, *tensor.shape[1:]).contiguous() for tensor in row)) for row in probes]
        expected = reference or [tuple(output[:1] for output in outputs) for outputs in results]
        if all(_same(outputs, first_row) for outputs, first_row in zip(results, expected, strict=True)):
            sizes.append(size)
            reference = expected
            if not several or time.perf_counter() - begin > _SLOW_CHECK_S:
                break
        size *= 2
    return tuple(sizes) or (1,)


def _same(outputs: Tensors, row: Tensors) -> bool:
    return all(bool((output == value).all()) for output, value in zip(outputs, row, strict=True))
