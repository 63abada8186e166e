"""From an LLM's hidden state to a frame of codes: semantic head, Euler steps with guidance, quantisation (section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from services.acoustic.model.flow import FlowMatching, make_schedule
from services.acoustic.model.weights import AcousticWeights
from services.voxtral.params import END_AUDIO, SPECIAL_CODES, VoxtralParams


class FrameInputs(NamedTuple):
    """What a batch of frames is made from, one row for each request."""

    hidden: torch.Tensor  # (B, D) run dtype
    cfg_alpha: torch.Tensor  # (B, 1) run dtype
    noise: torch.Tensor  # (B, A) run dtype
    end_allowed: torch.Tensor  # (B,) bool


class Frames(NamedTuple):
    """A batch of frames."""

    codes: torch.Tensor  # (B, K) int32, special shift included; an END_AUDIO frame is [1, 2, ..., 2]
    latents: torch.Tensor  # (B, A) run dtype: x after the last Euler step, not clamped
    finite: torch.Tensor  # (B,) bool: no NaN or infinity was met in logits and velocities of the row


@dataclass(frozen=True, slots=True)
class AcousticHead:
    """The acoustic head of one checkpoint in one dtype on one device. Rows of a batch do not influence each other."""

    weights: AcousticWeights
    params: VoxtralParams
    flow: FlowMatching

    @classmethod
    def of(cls, weights: AcousticWeights, params: VoxtralParams) -> Self:
        """The head with the checkpoint's number of Euler steps; projects the time grid once."""
        schedule = make_schedule(weights, params.acoustic, params.decoding_steps)
        return cls(weights, params, FlowMatching(weights, params.acoustic, schedule))

    def frames(
        self, hidden: torch.Tensor, cfg_alpha: torch.Tensor, noise: torch.Tensor, end_allowed: torch.Tensor
    ) -> Frames:
        """Compute a batch of frames; see FrameInputs for the arguments.

        Draws no noise, waits for no device and has no branch that depends on values, so it can be captured in a CUDA graph.
        """
        semantic, best = self.semantic_codes(self.semantic_logits(hidden), end_allowed)
        latents = self.solve(hidden, cfg_alpha, noise)
        levels = quantise(latents, self.params.acoustic_codebook_size)  # (B, A)
        acoustic = levels.masked_fill((semantic == END_AUDIO)[:, None], 0) + SPECIAL_CODES
        return Frames(
            codes=torch.cat([semantic.int()[:, None], acoustic], dim=1),
            latents=latents,
            finite=latents.isfinite().all(dim=1) & best.isfinite(),
        )

    def semantic_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the codes that may be chosen, END_AUDIO (1) to the last: (B, D) to (B, size + 1) float32."""
        return self.weights.semantic(hidden).float()

    def semantic_codes(self, logits: torch.Tensor, end_allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best code of each row, the first if several are equal, and its logit: (B,) int64, (B,) float32."""
        end = logits[:, :1].masked_fill(~end_allowed[:, None], -torch.inf)
        best, index = torch.cat([end, logits[:, 1:]], dim=1).max(dim=1)
        return index + END_AUDIO, best

    def solve(self, hidden: torch.Tensor, cfg_alpha: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Integrate from the noise with classifier-free guidance: latents (B, A)."""
        condition = self.flow.condition(hidden)
        rest = 1 - cfg_alpha
        x = noise
        for step, dt in enumerate(self.flow.schedule.dts):
            conditional, unconditional = self.flow.velocities(condition, step, x)
            x = x + (cfg_alpha * conditional + rest * unconditional) * dt
        return x


def quantise(latents: torch.Tensor, levels: int) -> torch.Tensor:
    """Level 0 to levels - 1 of each latent, rounding half to even in the latents' dtype: int32 of the same shape."""
    unit = (latents.clamp(-1, 1) + 1) / 2
    return (unit * (levels - 1)).round().int()
