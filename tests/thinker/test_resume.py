"""Failover: a request that comes with the frames made before goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stage_runtime.engine import Next

MakeDriver = Callable[..., Any]
MakeFrames = Callable[[int, int], list[list[int]]]

TEXT, VOICE = "hello the world, 42!", "tiny_b"


@pytest.mark.parametrize("made", [0, 1, 7, 110, 119, 120])
def test_resumed_request_goes_on_with_the_same_bits(
    make_driver: MakeDriver, make_frames: MakeFrames, made: int
) -> None:
    """On another engine, among others, the hidden states from the resumed frame on equal the undisturbed run bit for bit."""
    frames = make_frames(120, 1)
    calm = make_driver()
    whole = calm.speak(calm.submit(TEXT, VOICE, max_frames=120), frames)
    driver = make_driver(engine={"max_sequences": 8})
    others = [driver.submit(f"somebody {number}", "tiny_a") for number in range(3)]
    driver.start(*others)

    request = driver.submit(TEXT, VOICE, max_frames=120, prior=frames[:made])
    steps = 0
    while not request.outputs:
        fed = [(other, frames[steps]) for other in others if steps < 30]
        result = driver.step(*fed, (request, None))
        assert result.next[-1] in {Next.SILENT, Next.WAIT}
        steps += 1
    for frame in frames[made:]:
        driver.step((request, frame))

    assert request.first_index == made
    assert steps == made + 1
    assert torch.equal(torch.stack(request.outputs), whole[made:])


def test_free_mode_resumes_in_one_prefill(make_driver: MakeDriver, make_frames: MakeFrames) -> None:
    """Without batch_invariant the frames are appended to the prompt: one step, equal within 2e-5."""
    frames = make_frames(60, 2)
    driver = make_driver(batch_invariant=False)
    whole = driver.speak(driver.submit(TEXT, VOICE, max_frames=60), frames)

    request = driver.submit(TEXT, VOICE, max_frames=60, prior=frames[:50])
    driver.step((request, None))
    for frame in frames[50:]:
        driver.step((request, frame))

    torch.testing.assert_close(torch.stack(request.outputs), whole[50:], atol=2e-5, rtol=1e-5)
