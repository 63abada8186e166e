"""Forward passes of the language model (specification of Voxtral TTS, sections 4 and 6): prefill of a prompt, decode of a batch.

The hidden state that leaves is the one after the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from services.thinker.model.cache import KeyValueCache, cache_length
from services.thinker.model.weights import Block, ThinkerWeights
from services.voxtral.layers import rms_norm, swiglu
from services.voxtral.params import TransformerParams, VoxtralParams

# (layer, query (rows, heads, head_dim), key, value (rows, kv_heads, head_dim)) to (rows, heads * head_dim)
_Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DecodeRow(NamedTuple):
    """One request's row of a decode pass: its slot, and the position that the row takes there (so many are filled already)."""

    slot: int
    position: int


class _Run(NamedTuple):
    """Rows of a pass that follow each other in the cache too and see the same length: one attention call, no copies."""

    row: int
    size: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Thinker:
    """The language model of one checkpoint in one dtype on one device."""

    weights: ThinkerWeights
    params: TransformerParams
    offsets: torch.Tensor  # (K,) int64, first row of each codebook in the code table
    rope: torch.Tensor  # (positions, head_dim / 2) complex64, cos + i sin

    @classmethod
    def of(cls, weights: ThinkerWeights, params: VoxtralParams, max_positions: int) -> Self:
        """The model for up to `max_positions` positions."""
        offsets = torch.tensor(params.codebook_offsets, device=weights.device)
        return cls(weights, params.llm, offsets, rope_table(params.llm, cache_length(max_positions), weights.device))

    def embed_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the token table: (S,) int64 to (S, D)."""
        return F.embedding(ids, self.weights.token_table)

    def embed_frames(self, codes: torch.Tensor) -> torch.Tensor:
        """Sum of the K code embeddings of each frame, special shift included: (frames, K) int64 to (frames, D) (section 6)."""
        return F.embedding(codes + self.offsets, self.weights.code_table).sum(dim=1)

    def prefill(self, x: torch.Tensor, slot: int, cache: KeyValueCache) -> torch.Tensor:
        """Compute positions 0 to S - 1 of one request from embeddings (S, D), filling its slot; gives (S, D)."""
        grouped = self.params.n_heads != self.params.n_kv_heads

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.write_prompt(layer, slot, key, value)
            q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))  # (1, heads, S, head_dim)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out.squeeze(0).transpose(0, 1).flatten(1)

        return self._forward(x, self.rope[: x.shape[0]], attend)

    def decode(
        self, x: torch.Tensor, rows: Sequence[DecodeRow], cache: KeyValueCache, *, own_length: bool
    ) -> torch.Tensor:
        """Compute one position of each of several requests.

        Args:
            x: Embeddings (R, D). Row i belongs to `rows[i]`; rows from len(rows) on are padding, which touches no slot.
            rows: Slots, rising, and positions.
            cache: Holds the positions before.
            own_length: Let a request's attention run over a length that depends on its own position alone. False: all rows over
                the longest, in fewer calls; the last bits then depend on the others.

        Returns:
            Hidden states (R, D).
        """
        runs = list(_runs(rows, own_length=own_length))
        slots, positions = torch.tensor(rows).to(x.device).unbind(1)
        mask = _mask(positions, max(run.length for run in runs), x.dtype)
        targets = cache.rows(slots, positions)
        count = len(rows)
        # The query heads that share a kv head stand as its query positions: nothing is repeated, and all see one mask.
        grouped = (x.shape[0], self.params.n_kv_heads, -1, self.params.head_dim)

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.write_rows(layer, targets, key[:count], value[:count])
            q = query.view(grouped)
            out = torch.zeros_like(q, memory_format=torch.contiguous_format)
            for row, size, slot, length in runs:
                out[row : row + size] = F.scaled_dot_product_attention(
                    q[row : row + size],
                    cache.keys[layer, slot : slot + size, :, :length],
                    cache.values[layer, slot : slot + size, :, :length],
                    attn_mask=mask[row : row + size, None, None, :length],
                )
            return out.flatten(1)

        padded = F.pad(positions, (0, x.shape[0] - count))
        return self._forward(x, self.rope[padded], attend)

    def _forward(self, x: torch.Tensor, rope: torch.Tensor, attend: _Attend) -> torch.Tensor:
        for layer, block in enumerate(self.weights.blocks):
            x = self._block(layer, block, x, rope, attend)
        return rms_norm(x, self.weights.norm, self.params.norm_eps)

    def _block(self, layer: int, block: Block, x: torch.Tensor, rope: torch.Tensor, attend: _Attend) -> torch.Tensor:
        params = self.params
        normed = rms_norm(x, block.attention_norm, params.norm_eps)
        qkv = F.linear(normed, block.qkv).view(x.shape[0], -1, params.head_dim)  # (rows, heads + 2 kv_heads, head_dim)
        rotated = rotate(qkv[:, : -params.n_kv_heads], rope)
        value = qkv[:, -params.n_kv_heads :]
        attended = attend(layer, rotated[:, : params.n_heads], rotated[:, params.n_heads :], value)
        x = x + F.linear(attended, block.attention_output)
        gate_up = F.linear(rms_norm(x, block.ffn_norm, params.norm_eps), block.gate_up)
        return x + F.linear(swiglu(gate_up), block.down)


def rope_table(params: TransformerParams, positions: int, device: torch.device) -> torch.Tensor:
    """Unit complex numbers at angle p * theta^(-2j / head_dim): (positions, head_dim / 2) complex64, computed in float32."""
    exponents = torch.arange(0, params.head_dim, 2, dtype=torch.float32, device=device) / params.head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), params.rope_theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate the interleaved pairs (0, 1), (2, 3), ... of each head, in float32.

    (rows, heads, head_dim) and (rows, head_dim / 2) complex64 to (rows, heads, head_dim) in x's dtype, contiguous.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).to(x.dtype)


def _mask(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """0 up to each row's own position, -inf beyond: (n,) to (n, length)."""
    hidden = torch.arange(length, device=positions.device) > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def _runs(rows: Sequence[DecodeRow], *, own_length: bool) -> Iterator[_Run]:
    longest = max(row.position for row in rows) + 1
    lengths = [cache_length(row.position + 1 if own_length else longest) for row in rows]
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index].slot != rows[index - 1].slot + 1 or lengths[index] != lengths[start]:
            yield _Run(start, index - start, rows[start].slot, lengths[start])
            start = index
