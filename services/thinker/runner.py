"""Runs the language model for slots of the cache: embeds prompts and frames, lays out decode passes, warms up.

Knows slots and positions; knows nothing of requests and their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from services.thinker.model import DecodeRow, KeyValueCache, Thinker, ThinkerWeights
from services.thinker.prompt import FIRST_VOICE_ROW
from services.thinker.rows import invariant_sizes, split_rows
from services.thinker.settings import ThinkerSettings
from services.voxtral.checkpoint import Checkpoint

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """How a runner is to be made."""

    settings: ThinkerSettings
    slots: int
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool


class Runner:
    """A model with its cache. `sizes` holds the row counts of decode passes, or is empty: any row count."""

    def __init__(self, thinker: Thinker, cache: KeyValueCache, *, batch_invariant: bool) -> None:
        self.thinker = thinker
        self.cache = cache
        self.batch_invariant = batch_invariant
        self.sizes: tuple[int, ...] = ()

    @classmethod
    @torch.inference_mode()
    def load(cls, checkpoint: Checkpoint, plan: RunnerPlan) -> Self:
        """Read the weights, allocate the cache, choose row counts and warm up. Raises CheckpointDamaged, or what torch raises."""
        weights = ThinkerWeights.read(checkpoint.params, partial(checkpoint.load, dtype=plan.dtype, device=plan.device))
        positions = plan.settings.max_positions
        cache = KeyValueCache(checkpoint.params.llm, plan.slots, positions, plan.dtype, plan.device)
        thinker = Thinker.of(weights, checkpoint.params, positions)
        runner = cls(thinker, cache, batch_invariant=plan.batch_invariant)
        runner._warm_up(plan)
        return runner

    def prompt_embeddings(self, ids: Sequence[int], voice: torch.Tensor) -> torch.Tensor:
        """Token embeddings of a prompt, the placeholders replaced by the voice's rows (N, D): (S, D)."""
        x = self.thinker.embed_tokens(self._on_device(ids))
        x[FIRST_VOICE_ROW : FIRST_VOICE_ROW + voice.shape[0]] = voice
        return x

    def frame_embeddings(self, codes: npt.NDArray[np.int64]) -> torch.Tensor:
        """Embeddings of frames (frames, K): (frames, D)."""
        return self.thinker.embed_frames(self._on_device(codes))

    def prefill(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        """Fill a slot from position 0 on with (S, D); gives the hidden state of the last row, (1, D)."""
        return self.thinker.prefill(x, slot, self.cache)[-1:]

    def decode(self, rows: Sequence[DecodeRow], codes: npt.NDArray[np.int64]) -> torch.Tensor:
        """Feed one frame (n, K) to each of n slots, at their positions; gives hidden states (n, D) in the order of `rows`."""
        order = sorted(range(len(rows)), key=lambda index: rows[index].slot)
        parts: list[torch.Tensor] = []
        for part, size in split_rows(order, self.sizes or (len(rows),)):
            padded = np.zeros((size, codes.shape[1]), dtype=np.int64)
            padded[: len(part)] = codes[list(part)]
            places = [rows[index] for index in part]
            x = self.frame_embeddings(padded)
            hidden = self.thinker.decode(x, places, self.cache, own_length=self.batch_invariant)
            parts.append(hidden[: len(part)])
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        return hidden if order == sorted(order) else hidden[self._on_device(np.argsort(order))]

    def _warm_up(self, plan: RunnerPlan) -> None:
        """Run every shape of kernel once, and find the row counts for batch_invariant."""
        tokens = self._on_device([0] * _WARM_UP_TOKENS)
        self.prefill(self.thinker.embed_tokens(tokens), slot=0)
        codebooks = len(self.thinker.offsets)

        def run(size: int) -> torch.Tensor:
            # Codes 2, 3, ... exist in every codebook; any frame does.
            frame = 2 + np.arange(codebooks) % 16
            self.sizes = (size,)
            places = [DecodeRow(slot, _WARM_UP_TOKENS) for slot in range(min(size, plan.slots))]
            return self.decode(places, np.tile(frame, (len(places), 1)))

        self.cache.clear(0, _WARM_UP_TOKENS)
        on_cpu = plan.device.type == "cpu"
        sizes = invariant_sizes(
            run, first=plan.settings.invariant_rows or (4 if on_cpu else 32), limit=plan.slots, several=on_cpu
        )
        self.sizes = sizes if plan.batch_invariant else ()
        for slot in range(plan.slots):
            self.cache.clear(slot, _WARM_UP_TOKENS + 1)

    def _on_device(self, integers: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.as_tensor(integers, dtype=torch.int64).to(self.thinker.weights.device)
