"""Velocity of the flow-matching transformer and its time grid (specification of Voxtral TTS, sections 5.4 and 5.5).

The model sees sequences of three tokens, [noisy latent, time, condition], twice for each row: once with the condition of the LLM's
hidden state, once with a zero one. `FlowMatching.velocities` computes what the formulas say, leaving out what is the same for all rows or steps:

- the condition token and its first projections do not change from step to step: `Condition` holds them for a frame;
- the time token's do not depend on the frame: `Schedule` holds them;
- in the first block the latent token is the same in both halves, and a zero condition has zero queries, keys and values (or the biases);
- of the last block only token 0 is read, so only its query, output projection and feed-forward are computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from services.acoustic.model.weights import AcousticWeights, Block
from services.voxtral.layers import rms_norm, swiglu
from services.voxtral.params import TransformerParams

TOKENS = 3
_LATENT, _TIME, _CONDITION = range(TOKENS)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The Euler grid of n steps and what depends on time alone, in the run dtype and on the weights' device.

    It holds projections, so new weights need a new schedule. Row n of the tables belongs to t = 1, which no step evaluates.
    """

    timesteps: torch.Tensor  # (n + 1,)
    dts: tuple[torch.Tensor, ...]  # n scalars
    embeddings: torch.Tensor  # (n + 1, D)
    tokens: torch.Tensor  # (n + 1, D), projected embeddings
    qkv: torch.Tensor  # (n + 1, queries + keys + values), first block


@dataclass(frozen=True, slots=True)
class Condition:
    """Input of the first block for one batch. The first B rows are conditional, the others unconditional.

    The tokens of latent and time are overwritten in each step, through views that are made once.
    """

    residual: torch.Tensor  # (2B, 3, D)
    qkv: torch.Tensor  # (2B, 3, queries + keys + values)
    latent: torch.Tensor  # (2, B, D), view of `residual`
    time: torch.Tensor
    latent_qkv: torch.Tensor  # (2, B, queries + keys + values), view of `qkv`
    time_qkv: torch.Tensor


def time_embeddings(timesteps: torch.Tensor, dim: int) -> torch.Tensor:
    """Sinusoidal embedding of each time, cosines first: (times,) to (times, dim), float32 whatever the times are."""
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    frequencies = torch.exp(-math.log(10_000.0) * steps / half)
    angles = timesteps.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def make_schedule(weights: AcousticWeights, params: TransformerParams, step_count: int) -> Schedule:
    """The schedule of these weights. In bfloat16 the grid itself is bfloat16, hence uneven (section 5.4)."""
    timesteps = torch.linspace(0, 1, step_count + 1, dtype=weights.dtype, device=weights.device)
    embeddings = time_embeddings(timesteps, params.dim).to(weights.dtype)
    tokens = weights.time_projection(embeddings)
    first = weights.blocks[0]
    return Schedule(
        timesteps=timesteps,
        dts=(timesteps[1:] - timesteps[:-1]).unbind(),
        embeddings=embeddings,
        tokens=tokens,
        qkv=first.qkv(rms_norm(tokens, first.attention_norm, params.norm_eps)),
    )


@dataclass(frozen=True, slots=True)
class FlowMatching:
    """The velocity field of one set of weights."""

    weights: AcousticWeights
    params: TransformerParams
    schedule: Schedule

    def condition(self, hidden: torch.Tensor) -> Condition:
        """Project the LLM's hidden states (B, D) and lay out the first block's input."""
        first = self.weights.blocks[0]
        rows = hidden.shape[0]
        token = self.weights.condition_projection(hidden)  # (B, D)
        residual = token.new_zeros(2, rows, TOKENS, self.params.dim)
        residual[0, :, _CONDITION] = token
        qkv = token.new_zeros(2, rows, TOKENS, first.qkv.weight.shape[0])
        qkv[0, :, _CONDITION] = first.qkv(rms_norm(token, first.attention_norm, self.params.norm_eps))
        if first.qkv.bias is not None:
            qkv[1, :, _CONDITION] = first.qkv.bias
        return Condition(
            residual=residual.flatten(0, 1),
            qkv=qkv.flatten(0, 1),
            latent=residual[:, :, _LATENT],
            time=residual[:, :, _TIME],
            latent_qkv=qkv[:, :, _LATENT],
            time_qkv=qkv[:, :, _TIME],
        )

    def velocities(self, condition: Condition, step: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocity at x (B, A) in a step of the schedule: (conditional, unconditional), each (B, A)."""
        weights, params = self.weights, self.params
        first, *others = weights.blocks
        latent = weights.input_projection(x)  # (B, D)
        condition.latent.copy_(latent)
        condition.time.copy_(self.schedule.tokens[step])
        condition.latent_qkv.copy_(first.qkv(rms_norm(latent, first.attention_norm, params.norm_eps)))
        condition.time_qkv.copy_(self.schedule.qkv[step])
        last = weights.blocks[-1]
        hidden = _block(first, params, condition.residual, condition.qkv, last=first is last)
        for block in others:
            hidden = _block(block, params, hidden, None, last=block is last)
        out = weights.velocity(rms_norm(hidden[:, _LATENT], weights.norm, params.norm_eps))  # (2B, A)
        conditional, unconditional = out.chunk(2)
        return conditional, unconditional


def _block(
    block: Block, params: TransformerParams, x: torch.Tensor, qkv: torch.Tensor | None, *, last: bool
) -> torch.Tensor:
    """One block on (R, 3, D). `qkv`, if the caller has it already, is (R, 3, queries + keys + values).

    Gives (R, 3, D), or (R, 1, D), token 0, from the last block.
    """
    tokens = 1 if last else TOKENS
    query_width = params.n_heads * params.head_dim
    if qkv is not None:
        query, key_value = qkv[:, :tokens, :query_width], qkv[:, :, query_width:]
    else:
        query, key_value = _project(block, params, x, last=last)
    x = x[:, :tokens].reshape(-1, params.dim)  # (R * tokens, D)
    x = x + block.attention_output(attention(params, query, key_value))
    x = x + block.down(swiglu(block.gate_up(rms_norm(x, block.ffn_norm, params.norm_eps))))
    return x.view(-1, tokens, params.dim)


def _project(
    block: Block, params: TransformerParams, x: torch.Tensor, *, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the tokens that are needed, keys and values of all: (R, 3 or 1, queries), (R, 3, keys + values)."""
    normed = rms_norm(x, block.attention_norm, params.norm_eps)
    if last:
        query = block.queries(normed[:, _LATENT])
        key_value = block.keys_values(normed.view(-1, params.dim))
        return query.unsqueeze(1), key_value.view(-1, TOKENS, key_value.shape[1])
    qkv = block.qkv(normed.view(-1, params.dim)).view(-1, TOKENS, block.qkv.weight.shape[0])
    query_width = params.n_heads * params.head_dim
    return qkv[..., :query_width], qkv[..., query_width:]


def attention(params: TransformerParams, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
    """Every token attends to all three, without positions: (R, T, queries), (R, 3, keys + values) to (R * T, queries)."""
    rows, tokens, width = query.shape
    q = query.view(rows, tokens, params.n_heads, params.head_dim).transpose(1, 2)
    k, v = key_value.view(rows, TOKENS, 2, params.n_kv_heads, params.head_dim).permute(2, 0, 3, 1, 4)
    if query.dtype is torch.float32:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=params.n_heads != params.n_kv_heads)
    else:
        # The reference rounds scores and probabilities to the run dtype; fused kernels keep them in float32.
        grouped = q.reshape(rows, params.n_kv_heads, -1, tokens, params.head_dim)  # third axis: heads of one kv_head
        scores = grouped @ k.unsqueeze(2).transpose(-1, -2) * params.head_dim**-0.5
        out = (scores.softmax(dim=-1) @ v.unsqueeze(2)).flatten(1, 2)
    return out.transpose(1, 2).reshape(rows * tokens, width)
