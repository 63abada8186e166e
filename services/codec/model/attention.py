"""Causal attention with a sliding window and ALiBi, in blocks of queries (specification of Voxtral TTS, section 7.4).

A block of queries is set against the window before it and itself. Work and memory therefore grow with the length, not with its
square: 400 frames have 3200 time steps at the last level, of which a query sees 17.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

# Sequences of at most this many steps are one block: cheaper than padding and cutting them.
WHOLE_STEPS = 64
# Smallest block otherwise: shorter ones are many tiny matrices.
MIN_BLOCK_STEPS = 16
# Masks kept, the latest used. A stream needs about a dozen; one has at most heads * WHOLE_STEPS^2 numbers.
MAX_MASKS = 256


def alibi_slopes(heads: int) -> torch.Tensor:
    """ALiBi slopes (heads,) float32, beginning with 1; for a number of heads that is no power of 2 as in section 7.4."""
    base = 1 << (heads.bit_length() - 1)  # the largest power of 2 within
    slopes = _geometric(base) + _geometric(2 * base)[0::2][: heads - base]
    return torch.tensor(slopes, dtype=torch.float32)


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8 * head / heads) for head in range(heads)]


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a sequence is cut: blocks of `block` queries, each with `left` keys before it."""

    window: int
    block: int
    left: int


@dataclass(frozen=True, slots=True)
class WindowedAttention:
    """Attention for one set of slopes (heads,) float32. Scores and softmax are computed in float32."""

    slopes: torch.Tensor
    _masks: dict[_Shape, torch.Tensor] = field(default_factory=dict)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        """Attend; query i sees the keys i - window to i, with slope * (j - i) added to the score.

        Args:
            q: (B, T, heads, head_dim), scaled by 1/sqrt(head_dim) already.
            k: (B, T, kv_heads, head_dim).
            v: (B, T, kv_heads, head_dim).
            window: Keys before a query that it sees.

        Returns:
            (B, T, heads * head_dim) in the dtype of `v`.
        """
        batch, length, heads, head_dim = q.shape
        shape = _shape_for(length, window)
        if k.shape[2] != heads:
            k, v = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (k, v))
        over = -length % shape.block
        if over:
            q = F.pad(q, (0, 0, 0, 0, 0, over))
        if over or shape.left:
            k, v = (F.pad(part, (0, 0, 0, 0, shape.left, over)) for part in (k, v))
        queries = q.reshape(batch, -1, shape.block, heads, head_dim).transpose(
            2, 3
        )  # (B, blocks, heads, block, head_dim)
        # (B, blocks, heads, head_dim, left + block)
        keys, values = (part.unfold(1, shape.left + shape.block, shape.block) for part in (k, v))
        scores = queries.float() @ keys.float()
        scores += self._mask(shape)
        if shape.left:  # what is left of the first block is padding
            scores[:, 0, :, :, : shape.left] = -math.inf
        weights = torch.softmax(scores, dim=-1).to(v.dtype)
        out = (weights @ values.transpose(-1, -2)).transpose(2, 3).flatten(1, 2)  # (B, T + over, heads, head_dim)
        return out[:, :length].flatten(2)

    def _mask(self, shape: _Shape) -> torch.Tensor:
        """What is added to scores: (heads, block, left + block) float32, -inf where a query must not look."""
        mask = self._masks.pop(shape, None)
        if mask is None:
            keys = torch.arange(-shape.left, shape.block, device=self.slopes.device)
            distance = keys - torch.arange(shape.block, device=self.slopes.device)[:, None]
            mask = self.slopes[:, None, None] * distance
            mask = mask.masked_fill((distance > 0) | (distance < -shape.window), -math.inf)
            if len(self._masks) >= MAX_MASKS:
                del self._masks[next(iter(self._masks))]
        self._masks[shape] = mask  # last in order: latest used
        return mask


def _shape_for(length: int, window: int) -> _Shape:
    if length <= WHOLE_STEPS:
        return _Shape(window, block=length, left=0)
    return _Shape(window, block=max(window, MIN_BLOCK_STEPS), left=window)
