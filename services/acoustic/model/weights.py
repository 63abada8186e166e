"""Weights of the acoustic head, fused for fewer matrix products. Names and shapes: specification of Voxtral TTS, section 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from services.voxtral.params import END_AUDIO, VoxtralParams, expected_tensors
from stage_runtime.errors import CheckpointDamaged

PREFIX = "acoustic_transformer."

# From this size on a weight matrix does not fit the caches of a CPU core.
_LARGE_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. `weight` is (out, in), `bias` (out,) or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    columns: bool  # multiply as W x^T: the same sums, but BLAS libraries pass over a large W about twice as fast

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """A layer of these weights, contiguous, computed in the way that is faster for their size and device."""
        large = weight.numel() >= _LARGE_ELEMENTS
        columns = large and weight.device.type == "cpu" and weight.dtype is torch.float32
        return cls(weight.contiguous(), bias, columns)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to rows (rows, in); gives (rows, out), contiguous."""
        if not self.columns:
            return F.linear(x, self.weight, self.bias)
        y = torch.mm(self.weight, x.t()).t().contiguous()
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class Block:
    """One pre-norm transformer block."""

    attention_norm: torch.Tensor
    queries: Linear  # (heads * head_dim, D)
    keys_values: Linear  # (2 * kv_heads * head_dim, D)
    qkv: Linear  # both of the above, which are views of it
    attention_output: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear  # w1 above w3: (2 * hidden_dim, D)
    down: Linear


@dataclass(frozen=True, slots=True)
class AcousticWeights:
    """All weights of the head. Row r of `semantic` is for code r + 1: row 0 and the padding can never win, so are left out."""

    semantic: Linear
    input_projection: Linear
    time_projection: Linear
    condition_projection: Linear
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    velocity: Linear

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], params: VoxtralParams) -> Self:
        """Take the checkpoint's tensors, named without their prefix, all of one dtype and device (which may be "meta").

        Raises CheckpointDamaged if one is missing, unknown, or has another shape than `params` asks for.
        """
        _check(tensors, params)
        left = dict(tensors)
        semantic_bias = left.get("semantic_codebook_output.bias")
        codes = slice(END_AUDIO, params.semantic_codebook_size + 2)
        return cls(
            # Cloned, as the checkpoint's padded matrix need not stay in memory.
            semantic=Linear.of(
                left.pop("semantic_codebook_output.weight")[codes].clone(),
                None if semantic_bias is None else semantic_bias[codes].clone(),
            ),
            input_projection=Linear.of(left.pop("input_projection.weight")),
            time_projection=Linear.of(left.pop("time_projection.weight")),
            condition_projection=Linear.of(left.pop("llm_projection.weight")),
            blocks=tuple(_block(left, f"layers.{index}.") for index in range(params.acoustic.n_layers)),
            norm=left.pop("norm.weight"),
            velocity=Linear.of(left.pop("acoustic_codebook_output.weight")),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Run dtype."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.device


def _block(tensors: dict[str, torch.Tensor], prefix: str) -> Block:
    """Take one block's tensors out of `tensors`, so that each is freed once it was fused."""

    def take(name: str) -> torch.Tensor:
        return tensors.pop(prefix + name)

    def bias(name: str) -> torch.Tensor | None:
        return tensors.pop(f"{prefix}{name}.bias", None)

    query, key, value = (take(f"attention.{name}.weight") for name in ("wq", "wk", "wv"))
    query_bias, value_bias = bias("attention.wq"), bias("attention.wv")
    qkv = torch.cat([query, key, value])
    qkv_bias = None
    if query_bias is not None and value_bias is not None:  # keys never have one (section 2.1, use_biases)
        qkv_bias = torch.cat([query_bias, query_bias.new_zeros(key.shape[0]), value_bias])
    split = query.shape[0]
    return Block(
        attention_norm=take("attention_norm.weight"),
        queries=Linear.of(qkv[:split], None if qkv_bias is None else qkv_bias[:split]),
        keys_values=Linear.of(qkv[split:], None if qkv_bias is None else qkv_bias[split:]),
        qkv=Linear.of(qkv, qkv_bias),
        attention_output=Linear.of(take("attention.wo.weight"), bias("attention.wo")),
        ffn_norm=take("ffn_norm.weight"),
        gate_up=Linear.of(torch.cat([take("feed_forward.w1.weight"), take("feed_forward.w3.weight")])),
        down=Linear.of(take("feed_forward.w2.weight"), bias("feed_forward.w2")),
    )


def _check(tensors: Mapping[str, torch.Tensor], params: VoxtralParams) -> None:
    expected = {
        name.removeprefix(PREFIX): shape for name, shape in expected_tensors(params).items() if name.startswith(PREFIX)
    }
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CheckpointDamaged(PREFIX + missing[0], f"is missing, with {len(missing) - 1} other tensors")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise CheckpointDamaged(PREFIX + unknown[0], f"is no tensor of this model, nor are {len(unknown) - 1} others")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointDamaged(
                PREFIX + name, f"has shape {tuple(tensors[name].shape)}; params.json asks for {shape}"
            )
