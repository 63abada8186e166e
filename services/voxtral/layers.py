"""Layers that the Voxtral transformers share. Plain functions of tensors: no state, no modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Give x / sqrt(mean(x^2) + eps) * weight over the last axis, in the dtype of x, statistics in float32 (section 4)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Give silu(gate) * up of the fused projections [..., gate | up]: (..., 2 * hidden_dim) to (..., hidden_dim)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
