"""The key-value cache: one slot of fixed length for each request, allocated once."""

from __future__ import annotations

import torch

from services.voxtral.params import TransformerParams

# Lengths that attention sees are rounded up to a multiple of this, and so is the length of a slot.
LENGTH_MULTIPLE = 128


def cache_length(positions: int) -> int:
    """Positions that attention runs over, or a slot holds, for `positions` that are needed."""
    return -(-positions // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def slot_bytes(params: TransformerParams, max_positions: int, dtype: torch.dtype) -> int:
    """Memory of one slot."""
    row = 2 * params.n_layers * params.n_kv_heads * params.head_dim * dtype.itemsize
    return cache_length(max_positions) * row


class KeyValueCache:
    """Keys and values of all requests, (layers, slots, kv_heads, length, head_dim) each.

    What is not in use is zero, never left over: attention multiplies masked positions by zero, and zero times a NaN that some
    other request left there would be NaN.
    """

    def __init__(
        self, params: TransformerParams, slots: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = cache_length(max_positions)
        self.heads = params.n_kv_heads
        shape = (params.n_layers, slots, params.n_kv_heads, self.length, params.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write_prompt(self, layer: int, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store (positions, kv_heads, head_dim) from position 0 on."""
        self.keys[layer, slot, :, : key.shape[0]] = key.transpose(0, 1)
        self.values[layer, slot, :, : value.shape[0]] = value.transpose(0, 1)

    def rows(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where `write_rows` stores one position for each of n requests: (n,), (n,) to (n * kv_heads,) int64."""
        heads = slots[:, None] * self.heads + torch.arange(self.heads, device=slots.device)
        return (heads * self.length + positions[:, None]).flatten()

    def write_rows(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store (n, kv_heads, head_dim) at `rows`."""
        for cache, new in ((self.keys, key), (self.values, value)):
            flat = cache[layer].view(-1, cache.shape[-1])
            flat.index_copy_(0, rows, new.reshape(-1, cache.shape[-1]))

    def clear(self, slot: int, positions: int) -> None:
        """Zero the first `positions` of a slot."""
        self.keys[:, slot, :, :positions].zero_()
        self.values[:, slot, :, :positions].zero_()
