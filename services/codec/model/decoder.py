"""Forward pass of the codec's decoder (specification of Voxtral TTS, section 7). Time-major all through: (B, T, channels)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from services.codec.model.attention import WindowedAttention
from services.codec.model.weights import CodecWeights, Layer
from services.voxtral.layers import rms_norm, swiglu
from services.voxtral.params import SPECIAL_CODES, CodecParams


@dataclass(frozen=True, slots=True)
class CodecDecoder:
    """Codes to samples. Strictly causal: what stands to the right of a frame, padding say, does not change its samples."""

    params: CodecParams
    weights: CodecWeights
    attend: WindowedAttention
    acoustic_values: torch.Tensor  # (codes of an acoustic codebook with the special ones,) in the run dtype

    @classmethod
    def of(cls, weights: CodecWeights, params: CodecParams) -> Self:
        """A decoder of these weights."""
        table = weights.semantic_table
        levels = torch.arange(params.acoustic_codebook_size, device=table.device, dtype=torch.float32)
        values = levels * 2 / (params.acoustic_codebook_size - 1) - 1
        return cls(params, weights, WindowedAttention(weights.slopes), values.to(table.dtype))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.semantic_table.device

    def __call__(self, codes: torch.Tensor) -> torch.Tensor:
        """Samples (B, T * samples_per_frame) float32, not clipped, of `codes` (B, T, K) int64.

        Codes include the shift of 2 and must be real ones: 2 to 1 + the codebook's size.
        """
        x = self.latent(codes)
        for level in range(len(self.weights.levels)):
            x = self.level(level, x)
        return self.patches(x).flatten(1).float()

    def latent(self, codes: torch.Tensor) -> torch.Tensor:
        """Dequantise: (B, T, K) to (B, T, semantic_dim + acoustic_dim)."""
        plain = codes - SPECIAL_CODES
        semantic = F.embedding(plain[..., 0], self.weights.semantic_table)
        return torch.cat([semantic, self.acoustic_values[plain[..., 1:]]], dim=-1)

    def level(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Convolution and layers of one level: (B, T, channels) to (B, stride * T, dim)."""
        x = self.convolve(index, x)
        level = self.weights.levels[index]
        for layer in level.layers:
            x = self.layer(layer, x, level.window)
        return x

    def convolve(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What leads to a level: (B, T, channels) to (B, stride * T, dim). The left is filled with the first step, above level 0 with 0."""
        conv = self.weights.levels[index].conv
        if conv is None:
            return x
        left = conv.taps - 1
        if left and index == 0:
            x = torch.cat([x[:, :1].expand(-1, left, -1), x], dim=1)
        elif left:
            x = F.pad(x, (0, 0, left, 0))
        return conv(x)

    def layer(self, layer: Layer, x: torch.Tensor, window: int) -> torch.Tensor:
        """One transformer layer: (B, T, dim) to the same."""
        attended = self.attention(layer, x, window)
        x = _add_product(x, attended, layer.attention_output)
        y = rms_norm(x, layer.ffn_norm, self.params.norm_eps)
        return _add_product(x, swiglu(F.linear(y, layer.gate_up)), layer.down)

    def attention(self, layer: Layer, x: torch.Tensor, window: int) -> torch.Tensor:
        """What a layer's attention gives before the output projection: (B, T, dim) to (B, T, heads * head_dim)."""
        p = self.params
        y = rms_norm(x, layer.attention_norm, p.norm_eps)
        q, k, v = (F.linear(y, weight) for weight in (layer.query, layer.key, layer.value))
        if layer.query_norm is not None and layer.key_norm is not None:
            q = rms_norm(q, layer.query_norm, p.qk_norm_eps)  # over all heads together
            k = rms_norm(k, layer.key_norm, p.qk_norm_eps)
        q, k, v = (part.reshape(*part.shape[:2], -1, p.head_dim) for part in (q, k, v))
        return self.attend(q, k, v, window)

    def patches(self, x: torch.Tensor) -> torch.Tensor:
        """Output convolution: (B, T, dim) to (B, T, patch_size); T is at least its kernel.

        The left is filled by reflection about the first step. All steps that takes are of the first frame, which the loading of the
        weights has checked, so that no later frame matters.
        """
        left = self.weights.output.taps - 1
        return self.weights.output(torch.cat([x[:, 1 : left + 1].flip(1), x], dim=1))


def _add_product(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Give x + y weight^T."""
    return torch.addmm(x.flatten(0, 1), y.flatten(0, 1), weight.t()).reshape(x.shape)
