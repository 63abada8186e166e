"""Weights of the language model, fused for fewer matrix products. Names and shapes: specification of Voxtral TTS, section 2.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from services.voxtral.params import VoxtralParams

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """One pre-norm block. Queries and keys stay in the checkpoint's interleaved RoPE layout; see `transformer.rotate`."""

    attention_norm: torch.Tensor  # (D,)
    qkv: torch.Tensor  # ((heads + 2 * kv_heads) * head_dim, D)
    attention_output: torch.Tensor  # (D, heads * head_dim)
    ffn_norm: torch.Tensor  # (D,)
    gate_up: torch.Tensor  # (2 * hidden_dim, D), w1 above w3
    down: torch.Tensor  # (D, hidden_dim)

    @classmethod
    def of(cls, tensors: Tensors) -> Self:
        """The block of the nine tensors below `layers.<i>.`."""
        return cls(
            attention_norm=tensors["attention_norm.weight"],
            qkv=torch.cat([tensors[f"attention.w{name}.weight"] for name in "qkv"]),
            attention_output=tensors["attention.wo.weight"],
            ffn_norm=tensors["ffn_norm.weight"],
            gate_up=torch.cat([tensors["feed_forward.w1.weight"], tensors["feed_forward.w3.weight"]]),
            down=tensors["feed_forward.w2.weight"],
        )


@dataclass(frozen=True, slots=True)
class ThinkerWeights:
    """All weights of the language model. There is no output matrix: text logits are never computed."""

    token_table: torch.Tensor  # (vocab, D)
    code_table: torch.Tensor  # (rows of all codebooks, padded, D)
    blocks: tuple[Block, ...]
    norm: torch.Tensor  # (D,)

    @classmethod
    def read(cls, params: VoxtralParams, read: Callable[[str], Tensors]) -> Self:
        """Read the weights; `read(prefix)` gives the checkpoint's tensors below a prefix, without it.

        Block by block, so that of the tensors that get fused only one block's are in memory twice.
        """
        tables = read("mm_audio_embeddings.")
        return cls(
            token_table=tables["tok_embeddings.weight"],
            code_table=tables["audio_codebook_embeddings.embeddings.weight"],
            blocks=tuple(Block.of(read(f"layers.{index}.")) for index in range(params.llm.n_layers)),
            norm=read("norm.")["weight"],
        )

    @property
    def dtype(self) -> torch.dtype:
        """The run dtype."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.device
