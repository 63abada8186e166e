"""The acoustic head against the golden vectors: floats to 2e-5, integers exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.acoustic.model import AcousticHead, AcousticWeights
from services.acoustic.model.flow import TOKENS, _block, _project, attention, make_schedule, time_embeddings
from services.acoustic.model.head import quantise
from services.acoustic.model.weights import PREFIX
from services.voxtral.checkpoint import open_checkpoint
from services.voxtral.layers import rms_norm

Tensors = dict[str, torch.Tensor]
Golden = Callable[[str], Tensors]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Float32 on a CPU: the tolerance of the golden vectors."""
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


def test_time_grid_and_tables_are_the_golden_ones(golden: Golden, head: AcousticHead) -> None:
    """Time points, their differences, embeddings and projections agree."""
    expected = golden("time_embedding")
    schedule = head.flow.schedule

    close(schedule.timesteps, expected["timesteps"])
    close(torch.stack(schedule.dts), expected["dts"])
    close(schedule.embeddings, expected["t_emb_table"])
    close(schedule.tokens, expected["t_proj_table"])
    close(time_embeddings(schedule.timesteps, 3072), expected["t_emb_table_dim3072"])


def test_bfloat16_grid_is_uneven_like_the_reference(
    golden: Golden, make_head: Callable[[torch.dtype], AcousticHead]
) -> None:
    """In bfloat16 the grid itself is rounded, and embeddings are those of the rounded times, rounded once."""
    expected = golden("time_embedding")

    schedule = make_head(torch.bfloat16).flow.schedule

    assert torch.equal(schedule.timesteps, expected["timesteps_bf16"])
    assert torch.equal(torch.stack(schedule.dts), expected["dts_bf16"])
    angles = schedule.timesteps.float()[:, None] * expected["inv_freq"]
    assert torch.equal(schedule.embeddings, torch.cat([angles.cos(), angles.sin()], 1).bfloat16())


def test_blocks_give_the_golden_states(golden: Golden, head: AcousticHead) -> None:
    """The attention branch of block 0, the outputs of all blocks and the final norm agree for all three tokens."""
    expected = golden("velocity")
    params, weights = head.params.acoustic, head.weights
    x = expected["sequence"]
    first = weights.blocks[0]

    branch = first.attention_output(attention(params, *_project(first, params, x, last=False)))
    close(branch.view(-1, TOKENS, params.dim), expected["layer0_attention_out"])
    for index, block in enumerate(weights.blocks):
        x = _block(block, params, x, None, last=False)
        close(x, expected[f"layer{index}_out"])
    close(rms_norm(x, weights.norm, params.norm_eps), expected["final_norm"])


def test_last_block_of_token_0_alone_is_that_of_all_tokens(golden: Golden, head: AcousticHead) -> None:
    """The last block, reduced to token 0, gives the golden state of token 0."""
    expected = golden("velocity")

    x = _block(head.weights.blocks[-1], head.params.acoustic, expected["layer1_out"], None, last=True)

    close(x[:, 0], expected["layer2_out"][:, 0])


def test_velocity_is_the_golden_one(golden: Golden, head: AcousticHead) -> None:
    """Conditional velocities agree for all rows, unconditional ones for the rows whose condition is zero."""
    expected = golden("velocity")
    condition = head.flow.condition(expected["llm_hidden"])

    conditional, unconditional = head.flow.velocities(condition, 3, expected["x_t"])

    close(condition.residual[:, 2], torch.cat([expected["llm_proj"], torch.zeros(4, 48)]))
    close(conditional, expected["velocity"])
    close(unconditional[2:], expected["velocity"][2:])


@pytest.mark.parametrize("name", ["b1", "b3_eoa", "b5"])
def test_frames_are_the_golden_ones(golden: Golden, head: AcousticHead, name: str) -> None:
    """Logits, every velocity and state of the solver agree, and codes are equal, END_AUDIO frames included."""
    expected = golden(f"decode_frame_{name}")
    hidden, alpha, noise = expected["hidden"], expected["cfg_alpha"][:, None], expected["noise"]
    allowed = torch.ones(len(hidden), dtype=torch.bool)

    frames = head.frames(hidden, alpha, noise, allowed)

    logits = head.semantic_logits(hidden)
    close(logits, expected["semantic_logits_raw"][:, 1 : 1 + logits.shape[1]])
    assert expected["semantic_logits_masked"].isfinite().sum() == logits.numel()
    assert torch.equal(head.semantic_codes(logits, allowed)[0], expected["semantic_code"])
    condition = head.flow.condition(hidden)
    for step, x in enumerate(expected["trajectory"][:-1]):
        conditional, unconditional = head.flow.velocities(condition, step, x)
        close(conditional, expected["v_cond"][step])
        close(unconditional, expected["v_uncond"][step])
    close(frames.latents, expected["trajectory"][-1])
    assert torch.equal(frames.codes.long(), expected["codes"])
    assert torch.equal((frames.codes[:, 0] == 1).float(), expected["fake_eos"])
    assert frames.finite.all()


def test_the_number_of_steps_is_a_parameter(golden: Golden, make_params: Callable[..., object], model: object) -> None:
    """With n_decoding_steps = 4 the golden frames of four steps come out."""
    expected = golden("decode_frame_steps4")
    params = make_params(n_decoding_steps=4)
    weights = AcousticWeights.from_tensors(open_checkpoint(model).load(PREFIX, torch.float32), params)

    frames = AcousticHead.of(weights, params).frames(
        expected["hidden"], expected["cfg_alpha"][:, None], expected["noise"], torch.ones(2, dtype=torch.bool)
    )

    assert len(make_schedule(weights, params.acoustic, 4).dts) == int(expected["n_steps"])
    close(frames.latents, expected["trajectory"][-1])
    assert torch.equal(frames.codes.long(), expected["codes"])


def test_bfloat16_frames_are_the_golden_ones(golden: Golden, make_head: Callable[[torch.dtype], AcousticHead]) -> None:
    """In bfloat16 codes are equal, logits too, and the solver ends within the tolerance."""
    expected = golden("decode_frame_bf16")
    head = make_head(torch.bfloat16)
    alpha = expected["cfg_alpha"].bfloat16()[:, None]

    frames = head.frames(expected["hidden"], alpha, expected["noise"], torch.ones(4, dtype=torch.bool))

    logits = head.semantic_logits(expected["hidden"])
    torch.testing.assert_close(
        logits, expected["semantic_logits"].float()[:, 1 : 1 + logits.shape[1]], atol=0.02, rtol=0.01
    )
    assert frames.latents.dtype is torch.bfloat16
    torch.testing.assert_close(frames.latents, expected["trajectory"][-1], atol=0.1, rtol=0)
    assert torch.equal(frames.codes.long(), expected["codes"])


@pytest.mark.parametrize("name", ["e2e_voice_a", "e2e_voice_b_eoa"])
def test_utterances_are_the_golden_ones(golden: Golden, head: AcousticHead, name: str) -> None:
    """All frames of an utterance, computed as one batch and one by one, have the golden codes."""
    expected = golden(name)
    count = len(expected["hidden"])
    rows = (
        expected["hidden"],
        expected["cfg_alpha"].expand(count)[:, None],
        expected["noise"],
        torch.ones(count, dtype=torch.bool),
    )

    together = head.frames(*rows).codes
    alone = torch.cat([head.frames(*(t[at : at + 1] for t in rows)).codes for at in range(count)])

    assert torch.equal(together.long(), expected["codes"])
    assert torch.equal(alone.long(), expected["codes"])


def test_quantisation_rounds_half_to_even_and_clamps() -> None:
    """Values between two levels go to the even one; values outside [-1, 1] to the outermost levels."""
    halves = torch.arange(0, 20) + 0.5

    levels = quantise(halves / 10 - 1, 21)
    outside = quantise(torch.tensor([-7.0, -1.0, 1.0, 7.0]), 21)

    exact = (halves / 10 - 1 + 1) / 2 * 20 == halves  # those that float32 holds exactly
    assert exact.sum() > 5
    assert (levels % 2 == 0)[exact].all()
    assert outside.tolist() == [0, 0, 20, 20]


def test_quantisation_in_bfloat16_rounds_each_operation() -> None:
    """0.8516 in bfloat16 becomes 18.5 by the rounding of each operation, then 18, where exact arithmetic gives 19."""
    value = torch.tensor([0.8516]).bfloat16()

    assert quantise(value, 21).item() == 18
    assert quantise(value.float(), 21).item() == 19


def test_masked_end_gives_the_next_best_code(golden: Golden, head: AcousticHead) -> None:
    """A row whose best code is END_AUDIO gets the best other code when it may not end, and real acoustic codes; others stay."""
    expected = golden("decode_frame_b3_eoa")
    rows = (expected["hidden"], expected["cfg_alpha"][:, None], expected["noise"])

    codes = head.frames(*rows, torch.tensor([False, False, True])).codes

    others = expected["semantic_logits_masked"][1].clone()
    others[1] = -torch.inf
    assert expected["codes"][1].tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert codes[1, 0] == others.argmax()
    assert torch.equal(codes[1, 1:] - 2, quantise(expected["trajectory"][-1][1], 21))
    assert torch.equal(codes[[0, 2]].long(), expected["codes"][[0, 2]])
