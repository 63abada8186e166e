"""Weights of the codec's decoder, prepared once: weight norm and scales folded in, convolutions laid out as matrices.

Names and shapes: specification of Voxtral TTS, section 2.2. All preparation is done in float32, then cast to the run dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from services.codec.model.attention import alibi_slopes
from services.codec.model.geometry import attention_windows, conv_taps
from services.voxtral.params import CodecParams, VoxtralParams, decoder_blocks, expected_tensors
from stage_runtime.errors import CheckpointDamaged

PREFIX = "audio_tokenizer."
CLUSTER_USAGE_FLOOR = 1e-5

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class CausalConv:
    """A causal convolution as one matrix product.

    Its input row t is the last `taps` steps up to t, oldest first; its output row t is the `stride` steps that step t becomes.
    """

    weight: torch.Tensor  # (stride * out, taps * in)
    taps: int
    stride: int

    def __call__(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, taps - 1 + T, in) to (B, stride * T, out)."""
        rows = padded.unfold(1, self.taps, 1).transpose(2, 3).flatten(2) if self.taps > 1 else padded
        y = F.linear(rows, self.weight)
        return y.reshape(y.shape[0], y.shape[1] * self.stride, -1)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. The layer scales are part of `attention_output` and `down`, 1/sqrt(head_dim) of the queries."""

    attention_norm: torch.Tensor  # (C,)
    query: torch.Tensor  # (heads * head_dim, C)
    key: torch.Tensor  # (kv_heads * head_dim, C)
    value: torch.Tensor  # (kv_heads * head_dim, C)
    query_norm: torch.Tensor | None  # (heads * head_dim,)
    key_norm: torch.Tensor | None  # (kv_heads * head_dim,)
    attention_output: torch.Tensor  # (C, heads * head_dim)
    ffn_norm: torch.Tensor  # (C,)
    gate_up: torch.Tensor  # (2 * hidden_dim, C), w1 above w3
    down: torch.Tensor  # (C, hidden_dim)


@dataclass(frozen=True, slots=True)
class Level:
    """What runs at one time resolution: the convolution that leads to it (if any), then layers with one window."""

    conv: CausalConv | None
    layers: tuple[Layer, ...]
    window: int


@dataclass(frozen=True, slots=True)
class CodecWeights:
    """All weights of the decoder."""

    semantic_table: torch.Tensor  # (semantic codes, semantic_dim)
    levels: tuple[Level, ...]
    output: CausalConv
    slopes: torch.Tensor  # (heads,) float32

    @classmethod
    def from_tensors(cls, tensors: Tensors, params: VoxtralParams, dtype: torch.dtype) -> Self:
        """Prepare the checkpoint's tensors, named without their prefix and all on one device (which may be "meta").

        Raises CheckpointDamaged if one is missing, unknown, or has another shape than `params` asks for, or if `params` describe a
        decoder that cannot serve this model's frames.
        """
        _check_params(params)
        _check_tensors(tensors, params)
        codec = params.codec
        output = conv(weight_norm(tensors, "output_proj.conv")).to(dtype)
        return cls(
            semantic_table=semantic_table(tensors).to(dtype),
            levels=tuple(_levels(tensors, codec, dtype)),
            output=CausalConv(output, codec.patch_kernel, stride=1),
            slopes=alibi_slopes(codec.n_heads).to(output.device),
        )


def weight_norm(tensors: Tensors, name: str) -> torch.Tensor:
    """Weight of a convolution: g * v / ||v||, float32, the norm taken over all axes but axis 0."""
    g = tensors[f"{name}.parametrizations.weight.original0"].float()
    v = tensors[f"{name}.parametrizations.weight.original1"].float()
    norm: torch.Tensor = torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)
    return g * v / norm


def semantic_table(tensors: Tensors) -> torch.Tensor:
    """Vectors of the semantic codes, float32: sums of the vectors they stood for in training over how often they did."""
    usage = tensors["quantizer.semantic_codebook.cluster_usage"].float().clamp(min=CLUSTER_USAGE_FLOOR)
    return tensors["quantizer.semantic_codebook.embedding_sum"].float() / usage[:, None]


def conv(weight: torch.Tensor) -> torch.Tensor:
    """Matrix (out, kernel * in) of a causal Conv1d weight (out, in, kernel)."""
    return weight.transpose(1, 2).flatten(1)


def transposed_conv(weight: torch.Tensor, stride: int) -> torch.Tensor:
    """Matrix (stride * out, taps * in) of a ConvTranspose1d weight (in, out, kernel).

    Output step t * stride + r is the sum over m of weight[:, :, r + m * stride] applied to input step t - m.
    """
    inputs, outputs, kernel = weight.shape
    taps = conv_taps(kernel, stride)
    padded = F.pad(weight, (0, taps * stride - kernel)).reshape(inputs, outputs, taps, stride)
    oldest_first = padded.flip(2)
    return oldest_first.permute(3, 1, 2, 0).reshape(stride * outputs, taps * inputs)


def _levels(tensors: Tensors, codec: CodecParams, dtype: torch.dtype) -> list[Level]:
    windows = attention_windows(codec)
    levels: list[Level] = []
    convolution: CausalConv | None = None
    for index, kind, level in decoder_blocks(codec):
        prefix = f"decoder_blocks.{index}."
        if kind == "transformer":
            layers = [
                _layer(tensors, f"{prefix}layers.{layer}.", codec, dtype)
                for layer in range(codec.transformer_lengths[level])
            ]
            levels.append(Level(convolution, tuple(layers), windows[level]))
            convolution = None
            continue
        kernel, stride = codec.conv_kernels[level], codec.conv_strides[level]
        weight = weight_norm(tensors, f"{prefix}conv")
        matrix = conv(weight) if kind == "conv" else transposed_conv(weight, stride)
        convolution = CausalConv(matrix.to(dtype), conv_taps(kernel, stride), stride)
    return levels


def _layer(tensors: Tensors, prefix: str, codec: CodecParams, dtype: torch.dtype) -> Layer:
    def take(name: str) -> torch.Tensor:
        return tensors[prefix + name].float()

    def scale(name: str) -> torch.Tensor | float:
        return take(name)[:, None] if codec.layer_scale else 1.0

    query, query_norm, key_norm = take("attention.wq.weight"), None, None
    query_scale = 1 / math.sqrt(codec.head_dim)
    if codec.qk_norm:
        query_norm = (take("attention.q_norm.weight") * query_scale).to(dtype)
        key_norm = take("attention.k_norm.weight").to(dtype)
    else:
        query = query * query_scale
    return Layer(
        attention_norm=take("attention_norm.weight").to(dtype),
        query=query.to(dtype),
        key=take("attention.wk.weight").to(dtype),
        value=take("attention.wv.weight").to(dtype),
        query_norm=query_norm,
        key_norm=key_norm,
        attention_output=(take("attention.wo.weight") * scale("attention_scale")).to(dtype),
        ffn_norm=take("ffn_norm.weight").to(dtype),
        gate_up=torch.cat([take("feed_forward.w1.weight"), take("feed_forward.w3.weight")]).to(dtype),
        down=(take("feed_forward.w2.weight") * scale("ffn_scale")).to(dtype),
    )


def _check_params(params: VoxtralParams) -> None:
    codec = params.codec
    for name, ours, theirs in (
        ("semantic_codebook_size", codec.semantic_codebook_size, params.semantic_codebook_size),
        ("acoustic_codebook_size", codec.acoustic_codebook_size, params.acoustic_codebook_size),
        ("acoustic_dim", codec.acoustic_dim, params.acoustic_codebooks),
    ):
        if ours != theirs:
            raise CheckpointDamaged(
                "params.json", f"audio_tokenizer_args.{name} is {ours}, but the model makes codes for {theirs}"
            )
    if codec.patch_kernel > codec.upsampling:
        # The reflection at the start would take in later frames, so that audio could not be made before these are known.
        raise CheckpointDamaged(
            "params.json",
            f"patch_proj_kernel_size is {codec.patch_kernel}; at most the {codec.upsampling} patches of a frame are supported",
        )


def _check_tensors(tensors: Tensors, params: VoxtralParams) -> None:
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
