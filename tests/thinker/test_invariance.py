"""batch_invariant on a CPU: a request's bits do not depend on who shares the batch, on its slot, or on the process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from services.thinker.model import DecodeRow, KeyValueCache, Thinker, ThinkerWeights
from services.thinker.model.transformer import rope_table
from services.thinker.model.weights import Block
from services.voxtral.params import TransformerParams

MakeDriver = Callable[..., Any]
MakeFrames = Callable[[int, int], list[list[int]]]

TEXT, VOICE = "hello the world, 42!", "tiny_a"
# Past position 128, where attention goes over to another length.
FRAMES = 130

ROOT = Path(__file__).resolve().parents[2]

IN_ANOTHER_PROCESS = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from conftest import Driver, MODEL, StageSettings, create_engine
torch.set_num_threads(1)
engine = create_engine(StageSettings(kind="voxtral.thinker", addresses=("unix:x",), model=MODEL))
engine.load()
driver = Driver(engine)
for _ in range(3):
    driver.submit("somebody else", "tiny_b")
text, voice, frames = json.loads(sys.argv[2])
hidden = driver.speak(driver.submit(text, voice, max_frames=200), frames)
print(hashlib.sha256(hidden.numpy().tobytes()).hexdigest(), end="")
"""


@pytest.fixture
def alone(make_driver: MakeDriver, make_frames: MakeFrames) -> torch.Tensor:
    """Hidden states of the request under test when nobody else is there."""
    driver = make_driver()
    return driver.speak(driver.submit(TEXT, VOICE, max_frames=200), make_frames(FRAMES, 1))


def test_partners_that_join_and_leave_change_no_bit(
    make_driver: MakeDriver, make_frames: MakeFrames, alone: torch.Tensor
) -> None:
    """Up to 15 others of all ages come and go, in changing order, and are stepped now and then; the request sees nothing of it."""
    random = Random(7)
    driver = make_driver()
    others: list[Any] = []
    target = driver.submit(TEXT, VOICE, max_frames=200)
    driver.start(target)
    sizes = set()

    for frame in make_frames(FRAMES, 1):
        while others and random.random() < 0.2:
            driver.engine.release(others.pop(random.randrange(len(others))).state)
        while len(others) < 15 and random.random() < 0.6:
            text = "".join(random.choice("abc de") for _ in range(random.randrange(1, 120))) + "."
            others.append(driver.submit(text, random.choice(["tiny_a", "tiny_b"]), max_frames=2000))
        batch = [(other, None if not other.outputs else make_frames(1, random.randrange(1000))[0]) for other in others]
        batch = [pair for pair in batch if random.random() < 0.8]
        batch.insert(random.randrange(len(batch) + 1), (target, frame))
        sizes.add(len(batch))
        driver.step(*batch)

    assert len(sizes) > 8
    assert torch.equal(torch.stack(target.outputs), alone)


@pytest.mark.parametrize("slot", range(16))
def test_every_slot_gives_the_same_bits(
    make_driver: MakeDriver, make_frames: MakeFrames, alone: torch.Tensor, slot: int
) -> None:
    """Whichever slot a request gets, and whoever sits below it, its bits are the same."""
    driver = make_driver(engine={"max_sequences": 16, "max_prefills_per_step": 16})
    below = [driver.submit(f"number {number}", "tiny_b") for number in range(slot)]
    target = driver.submit(TEXT, VOICE, max_frames=200)

    driver.start(target, *below)
    for frame, other_frame in zip(make_frames(20, 1), make_frames(20, 2), strict=True):
        driver.step(*((other, other_frame) for other in below), (target, frame))

    assert target.state.slot == slot
    assert torch.equal(torch.stack(target.outputs), alone[:21])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_full_batch_gives_each_request_its_own_bits(
    make_driver: MakeDriver, make_frames: MakeFrames, dtype: str, threads: int
) -> None:
    """Each of 32 requests in one batch has the bits that it has alone, in both dtypes and with several threads."""
    torch.set_num_threads(threads)
    driver = make_driver(dtype=dtype, engine={"max_prefills_per_step": 32})
    texts = [f"text number {number} " * (1 + number % 5) for number in range(32)]
    frames = [make_frames(6, number) for number in range(32)]
    single = [
        driver.speak(driver.submit(text, "tiny_b"), own) for text, own in zip(texts[::5], frames[::5], strict=True)
    ]

    together = [driver.submit(text, "tiny_b") for text in texts]
    driver.step(*((request, None) for request in together))
    for step in range(6):
        driver.step(*((request, own[step]) for request, own in zip(together, frames, strict=True)))

    for request, expected in zip(together[::5], single, strict=True):
        assert torch.equal(torch.stack(request.outputs), expected)


def test_another_process_gives_the_same_bits(make_frames: MakeFrames, alone: torch.Tensor) -> None:
    """A second process, whose memory lies elsewhere and whose slots are taken otherwise, computes the same bits."""
    arguments = [str(Path(__file__).parent), json.dumps([TEXT, VOICE, make_frames(FRAMES, 1)])]

    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout == hashlib.sha256(alone.numpy().tobytes()).hexdigest()


def test_row_count_without_equal_bits_is_not_used(make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a kernel gives rows of one pass other bits by place, passes fall back to one row, which cannot differ."""
    decode = Thinker.decode

    def uneven(self: Any, x: torch.Tensor, rows: Any, cache: Any, *, own_length: bool) -> torch.Tensor:
        hidden = decode(self, x, rows, cache, own_length=own_length)
        return hidden + 1e-6 * torch.arange(len(hidden))[:, None]

    monkeypatch.setattr(Thinker, "decode", uneven)

    assert make_driver().engine._runner.sizes == (1,)


def test_free_mode_agrees_within_tolerance(
    make_driver: MakeDriver, make_frames: MakeFrames, alone: torch.Tensor
) -> None:
    """Without batch_invariant a request among others agrees with itself alone within 2e-5 (float32, other blocking)."""
    driver = make_driver(batch_invariant=False, engine={"max_prefills_per_step": 16})
    others = [driver.submit("x" * (10 * number + 1), "tiny_b", max_frames=200) for number in range(10)]
    target = driver.submit(TEXT, VOICE, max_frames=200)
    driver.engine.release(others.pop(4).state)  # a gap between the slots in use

    driver.start(target, *others)
    for frame in make_frames(FRAMES, 1):
        driver.step((target, frame), *((other, frame) for other in others))

    torch.testing.assert_close(torch.stack(target.outputs), alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_engine_asks_for_own_attention_lengths(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    """The model is told to keep each request to its own attention length exactly if batch_invariant is on."""
    asked = []
    decode = Thinker.decode

    def listening(self: Any, x: torch.Tensor, rows: Any, cache: Any, *, own_length: bool) -> torch.Tensor:
        asked.append(own_length)
        return decode(self, x, rows, cache, own_length=own_length)

    driver = make_driver(batch_invariant=batch_invariant)
    monkeypatch.setattr(Thinker, "decode", listening)
    driver.speak(driver.submit("x", "tiny_a"), [[2] * 7])

    assert asked == [batch_invariant]


@torch.inference_mode()
def test_attention_length_of_a_partner_changes_no_bit() -> None:
    """A row alone has the bits that it has beside a row that is further on, with heads as wide and grouped as the release's.

    The kernels of the golden model's small heads do not show the difference that another padded length makes; these do.
    """
    params = TransformerParams(512, 1, 128, 64, 32, 8, 1e-5, 1e6, use_biases=False)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    block = Block(random(512), random(6144, 512), random(512, 4096), random(512), random(128, 512), random(512, 64))
    weights = ThinkerWeights(random(4, 512), random(4, 512), (block,), random(512))
    thinker = Thinker(weights, params, torch.zeros(1, dtype=torch.int64), rope_table(params, 1024, torch.device("cpu")))
    cache = KeyValueCache(params, 2, 1024, torch.float32, torch.device("cpu"))
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    x = random(4, 512)
    rows = [DecodeRow(0, 200), DecodeRow(1, 500)]

    alone = thinker.decode(x, rows[:1], cache, own_length=True)[0]

    assert torch.equal(thinker.decode(x, rows, cache, own_length=True)[0], alone)
    torch.testing.assert_close(thinker.decode(x, rows, cache, own_length=False)[0], alone, atol=1e-5, rtol=1e-5)
