"""The acoustic head written down plainly, formula by formula: what the served one is measured against and must agree with.

Specification of Voxtral TTS, sections 5.3 and 5.4. Nothing is hoisted, fused or left out: in each Euler step the condition (2B rows) and
the time are projected anew, all 2B rows of all three tokens pass through all blocks, and every weight matrix is multiplied by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from services.voxtral.params import TransformerParams, VoxtralParams

Tensors = Mapping[str, torch.Tensor]


def frames(
    tensors: Tensors, params: VoxtralParams, hidden: torch.Tensor, cfg_alpha: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Codes (B, K) int32 from hidden (B, D), cfg_alpha (B, 1) and noise (B, A), all of the weights' dtype.

    `tensors` holds the checkpoint's acoustic tensors by name, without prefix.
    """
    logits = _linear(tensors, "semantic_codebook_output", hidden).float()
    logits[:, 0] = -math.inf
    logits[:, 2 + params.semantic_codebook_size :] = -math.inf
    semantic = logits.argmax(dim=1)
    rows, steps = len(hidden), params.decoding_steps
    timesteps = torch.linspace(0, 1, steps + 1, dtype=hidden.dtype)
    x = noise
    for step in range(steps):
        condition = torch.cat([hidden, torch.zeros_like(hidden)])
        v = _velocity(tensors, params.acoustic, torch.cat([x, x]), condition, timesteps[step])
        dt = timesteps[step + 1] - timesteps[step]
        x = x + (cfg_alpha * v[:rows] + (1 - cfg_alpha) * v[rows:]) * dt
    levels = torch.round((x.clamp(-1, 1) + 1) / 2 * (params.acoustic_codebook_size - 1)).int()
    levels[semantic == 1] = 0
    return torch.cat([semantic.int()[:, None], levels + 2], dim=1)


def _velocity(
    tensors: Tensors, params: TransformerParams, x: torch.Tensor, condition: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    half = params.dim // 2
    angles = t.float() * torch.exp(-math.log(10_000.0) * torch.arange(half) / half)
    tau = torch.cat([angles.cos(), angles.sin()]).to(x.dtype)
    tokens = torch.stack(
        [
            _linear(tensors, "input_projection", x),
            _linear(tensors, "time_projection", tau).expand(len(x), -1),
            _linear(tensors, "llm_projection", condition),
        ],
        dim=1,
    )
    for index in range(params.n_layers):
        tokens = _block(tensors, f"layers.{index}.", params, tokens)
    normed = F.rms_norm(tokens, (params.dim,), tensors["norm.weight"], params.norm_eps)
    return _linear(tensors, "acoustic_codebook_output", normed[:, 0])


def _block(tensors: Tensors, prefix: str, params: TransformerParams, x: torch.Tensor) -> torch.Tensor:
    def norm(name: str) -> torch.Tensor:
        return F.rms_norm(x, (params.dim,), tensors[f"{prefix}{name}.weight"], params.norm_eps)

    def linear(name: str, y: torch.Tensor) -> torch.Tensor:
        return _linear(tensors, prefix + name, y)

    def heads(name: str, count: int, y: torch.Tensor) -> torch.Tensor:
        return linear(name, y).view(*y.shape[:2], count, params.head_dim).transpose(1, 2)

    y = norm("attention_norm")
    q = heads("attention.wq", params.n_heads, y)
    k = heads("attention.wk", params.n_kv_heads, y).repeat_interleave(params.n_heads // params.n_kv_heads, dim=1)
    v = heads("attention.wv", params.n_kv_heads, y).repeat_interleave(params.n_heads // params.n_kv_heads, dim=1)
    weights = (q @ k.transpose(-1, -2) * params.head_dim**-0.5).softmax(dim=-1)
    x = x + linear("attention.wo", (weights @ v).transpose(1, 2).flatten(2))
    y = norm("ffn_norm")
    return x + linear("feed_forward.w2", F.silu(linear("feed_forward.w1", y)) * linear("feed_forward.w3", y))


def _linear(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
