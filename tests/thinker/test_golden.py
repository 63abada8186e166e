"""The thinker against the golden vectors: prompts, embeddings, prefill, and both end-to-end runs through the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.thinker.model import KeyValueCache, Thinker, ThinkerWeights
from services.thinker.prompt import PromptBuilder
from services.voxtral.checkpoint import open_checkpoint

Golden = Callable[[str], dict[str, torch.Tensor]]

# Stated with the vectors for float32 on a CPU: two independent implementations agree within 2.8e-6.
close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-5)

MODEL = Path(__file__).resolve().parents[2] / "models" / "embedded" / "voxtral-golden"
RUNS = {"e2e_voice_a": ("hello the world, 42!", "tiny_a"), "e2e_voice_b_eoa": ("the end.", "tiny_b")}


@pytest.fixture
def thinker() -> Thinker:
    """The golden model in float32."""
    checkpoint = open_checkpoint(MODEL)
    read = partial(checkpoint.load, dtype=torch.float32)
    return Thinker.of(ThinkerWeights.read(checkpoint.params, read), checkpoint.params, 256)


def test_prompts_have_the_golden_ids(golden_json: Callable[[str], Any]) -> None:
    """Every text gives exactly the expected ids: nothing normalised, nothing added, markers resolved by name."""
    prompts = PromptBuilder.open(MODEL, open_checkpoint(MODEL).params)

    cases = golden_json("prompts")["cases"]

    assert len(cases) == 26
    for case in cases:
        prompt = prompts.build(case["text"], case["voice"])
        assert list(prompt.ids) == case["ids"]
        assert prompt.ids.count(24) == prompt.voice_row_count == {"tiny_a": 5, "tiny_b": 9}[case["voice"]]


def test_frame_embeddings_are_golden(thinker: Thinker, golden: Golden) -> None:
    """A frame's embedding is the sum over its codebooks, for END_AUDIO frames and the largest ids too."""
    vectors = golden("code_embedding")

    close(thinker.embed_frames(vectors["codes"]), vectors["embeddings"])
    assert thinker.offsets.tolist() == vectors["offsets"].tolist()


def test_prefill_is_golden(thinker: Thinker, golden: Golden) -> None:
    """Voice rows stand in the prompt's embeddings, and the hidden states of all positions are the reference's."""
    vectors = golden("llm_prefill")
    cache = KeyValueCache(thinker.params, 2, 256, torch.float32, torch.device("cpu"))
    x = thinker.embed_tokens(vectors["prompt_ids"])
    x[vectors["prompt_ids"] == 24] = vectors["voice_embedding"].float()

    hidden = thinker.prefill(vectors["inputs_embeds"], 1, cache)

    close(x, vectors["inputs_embeds"])
    close(hidden, vectors["hidden"])


@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "free"])
@pytest.mark.parametrize("run", RUNS)
def test_engine_gives_the_golden_hidden_states(
    make_driver: Callable[..., Any], golden: Golden, run: str, batch_invariant: bool
) -> None:
    """Fed with the golden codes, the engine gives the golden hidden state for every frame, the first from the prompt."""
    vectors = golden(run)
    driver = make_driver(batch_invariant=batch_invariant)
    text, voice = RUNS[run]
    request = driver.submit(text, voice)

    hidden = driver.speak(request, vectors["codes"].tolist())

    assert request.prompt_token_count == len(vectors["prompt_ids"])
    assert request.text_token_count == len(vectors["prompt_ids"]) - 5 - len(vectors["voice_embedding"])
    close(hidden[:-1], vectors["hidden"])
    close(hidden[0], vectors["prefill_hidden"][-1])


def test_prompt_embeddings_are_golden(make_engine: Callable[..., Any], golden: Golden) -> None:
    """The embeddings that the engine prefills are those of the reference, voice rows included."""
    vectors = golden("e2e_voice_b_eoa")
    engine = make_engine()
    voice = engine._voice_rows["tiny_b"]

    close(engine._runner.prompt_embeddings(vectors["prompt_ids"].tolist(), voice), vectors["prompt_embeds"])
    close(engine._runner.frame_embeddings(vectors["codes"].numpy().astype(np.int64)), vectors["code_embeds"])


@pytest.mark.parametrize("run", RUNS)
def test_bfloat16_run_stays_close_to_float32(make_driver: Callable[..., Any], golden: Golden, run: str) -> None:
    """In bfloat16 the hidden states have the wire type bf16 and differ from the float32 reference by rounding only.

    bfloat16 has 8 bits of precision, so each of the few dozen roundings on the way is up to 0.4 %.
    """
    vectors = golden(run)
    driver = make_driver(dtype="bfloat16")

    hidden = driver.speak(driver.submit(*RUNS[run]), vectors["codes"].tolist())[:-1]

    error = (hidden.float() - vectors["hidden"]).square().mean().sqrt() / vectors["hidden"].square().mean().sqrt()
    assert hidden.dtype is torch.bfloat16
    assert 1e-4 < error < 2e-2
