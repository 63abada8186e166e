"""The thinker engine's contract: description, steps, faulty input, retries, sleep."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.thinker.runner import Runner
from stage_runtime.engine import Next
from stage_runtime.errors import CheckpointDamaged, StageOutOfMemory, StageProtocolError
from stage_runtime.tensors import DType, TensorSpec

MakeDriver = Callable[..., Any]
MakeFrames = Callable[[int, int], list[list[int]]]

ROOT = Path(__file__).resolve().parents[2]
TEXT = "hello the world, 42!"


def test_description_tells_kind_tensors_and_facts(make_driver: MakeDriver) -> None:
    """The router learns everything that it checks requests against."""
    description = make_driver().engine.describe()

    assert (description.kind, description.model) == ("voxtral.thinker", "voxtral-golden")
    assert description.capacity == 32
    assert description.inputs == (TensorSpec("codes", DType.I32, (7,)),)
    assert description.outputs == (TensorSpec("hidden", DType.F32, (48,)),)
    facts = description.facts
    assert [(voice.name, voice.row_count, list(voice.language_codes)) for voice in facts.voices] == [
        ("tiny_a", 5, []),
        ("tiny_b", 9, []),
    ]
    assert (facts.max_positions, facts.codebook_count, facts.encoder_loaded) == (4608, 7, False)
    assert facts.cache_token_count == 32 * 4608


def test_fingerprint_covers_everything_that_hidden_states_depend_on(make_driver: MakeDriver, checkpoint: Path) -> None:
    """Equal files give equal fingerprints; another dtype, tokenizer or voice gives another."""

    def fingerprint(**settings: Any) -> str:
        return make_driver(**settings).engine.describe().fingerprint

    original = fingerprint()
    found = [original, fingerprint(dtype="bfloat16")]
    assert fingerprint(model=checkpoint) == original
    tekken = checkpoint / "tekken.json"
    tekken.write_text(tekken.read_text() + "\n")
    found.append(fingerprint(model=checkpoint))
    torch.save(torch.zeros(5, 48, dtype=torch.bfloat16), checkpoint / "voice_embedding" / "tiny_a.pt")
    found.append(fingerprint(model=checkpoint))

    assert len(set(found)) == 4


def test_voices_of_equal_length_are_not_mixed(make_driver: MakeDriver, checkpoint: Path) -> None:
    """Two voices with the same N have the same prompt ids; each request still hears its own voice, in one batch and after another."""
    tekken = checkpoint / "tekken.json"
    tekken.write_text(tekken.read_text().replace('"tiny_b": 9', '"tiny_b": 5').replace('"tiny_b":9', '"tiny_b":5'))
    rows = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    torch.save(rows, checkpoint / "voice_embedding" / "tiny_b.pt")
    driver = make_driver(model=checkpoint)
    first, second = driver.submit(TEXT, "tiny_a"), driver.submit(TEXT, "tiny_b")
    driver.start(first, second)
    driver.engine.release(first.state)
    again = driver.submit(TEXT, "tiny_b")
    driver.start(again)

    assert first.state.prompt.ids == second.state.prompt.ids
    assert not torch.allclose(first.outputs[0], second.outputs[0], atol=1e-2)
    assert again.state.slot == first.state.slot
    assert torch.equal(again.outputs[0], second.outputs[0])


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_prefills_of_a_step_are_bounded(make_driver: MakeDriver, limit: int) -> None:
    """A step computes at most so many prompts, those admitted first; requests in progress move on in every step."""
    driver = make_driver(engine={"max_prefills_per_step": limit})
    running = driver.submit("x", "tiny_a")
    driver.start(running)
    waiting = [driver.submit(f"number {number}", "tiny_a") for number in range(4)]

    first = driver.step(*((request, None) for request in reversed(waiting)), (running, [2] * 7))

    assert [bool(request.outputs) for request in waiting] == [index < limit for index in range(4)]
    assert first.next.count(Next.SILENT) == max(0, 4 - limit)
    assert len(running.outputs) == 2


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        ([96, 2, 2, 2, 2, 2, 2], "code 96 of codebook 0 is not in 0 to 95"),
        ([-1, 2, 2, 2, 2, 2, 2], "code -1 of codebook 0 is not in 0 to 95"),
        ([2, 2, 2, 23, 2, 2, 2], "code 23 of codebook 3 is not in 0 to 22"),
        ([2, 2, 2, 2, 2, 2, 2**31 - 1], "code 2147483647 of codebook 6 is not in 0 to 22"),
    ],
)
def test_codes_out_of_range_fail_that_request_alone(make_driver: MakeDriver, frame: list[int], fault: str) -> None:
    """A frame that would read beside its codebook fails its request with place and range; the others go on."""
    driver = make_driver()
    bad, good = driver.submit(TEXT, "tiny_a"), driver.submit(TEXT, "tiny_a")
    driver.start(bad, good)

    result = driver.step((bad, frame), (good, [2] * 7))

    assert result.next == [Next.FAILED, Next.WAIT]
    assert isinstance(result.errors[0], StageProtocolError)
    assert str(result.errors[0]).endswith(f": frame 0: {fault}")
    assert len(good.outputs) == 2


def test_whole_range_of_codes_is_accepted(make_driver: MakeDriver) -> None:
    """EMPTY_AUDIO, END_AUDIO and the largest code of every codebook are frames like others."""
    driver = make_driver()

    hidden = driver.speak(driver.submit(TEXT, "tiny_a"), [[0] * 7, [1, *[2] * 6], [95, *[22] * 6]])

    assert hidden.isfinite().all()


def test_step_of_nothing_but_faults_gives_no_rows(make_driver: MakeDriver) -> None:
    """If every request of a step fails there is an empty tensor, not an error of the step."""
    driver = make_driver()
    request = driver.submit(TEXT, "tiny_a")
    driver.start(request)

    result = driver.step((request, [96] * 7))

    assert result.next == [Next.FAILED]
    assert (result.tensors["hidden"].row_count, result.tensors["hidden"].row_shape) == (0, (48,))


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_step_that_raises_leaves_every_state_as_it_was(
    make_driver: MakeDriver, make_frames: MakeFrames, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """After an error anywhere in a step the same step can be tried again and gives the bits of an undisturbed run."""
    frames = make_frames(4, 5)
    calm = make_driver()
    expected = [calm.speak(calm.submit(text, "tiny_b"), frames) for text in ("one", "two")]
    driver = make_driver()
    old, new = driver.submit("one", "tiny_b"), driver.submit("two", "tiny_b")
    driver.start(old)
    original = getattr(Runner, failing)

    def fails_after_the_work(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise torch.OutOfMemoryError("as if")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, failing, fails_after_the_work)
        with pytest.raises(torch.OutOfMemoryError):
            driver.step((new, None), (old, frames[0]))
    driver.engine.recover()
    driver.step((new, None), (old, frames[0]))
    for index in range(1, 4):
        driver.step((old, frames[index]), (new, frames[index - 1]))
    driver.step((new, frames[3]))

    assert torch.equal(torch.stack(old.outputs), expected[0])
    assert torch.equal(torch.stack(new.outputs), expected[1])


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_change_no_bit(make_driver: MakeDriver, make_frames: MakeFrames, level: int) -> None:
    """After waking, the engine tells the same of itself and speaks with the same bits; level 2 holds no weights meanwhile."""
    frames = make_frames(5, 6)
    driver = make_driver()
    before, description = driver.speak(driver.submit(TEXT, "tiny_a"), frames), driver.engine.describe()

    driver.engine.sleep(level)
    asleep = driver.engine._runner
    driver.engine.wake()
    driver.engine.wake()

    assert (asleep is None) == (level == 2)
    assert driver.engine.describe() == description
    assert torch.equal(driver.speak(driver.submit(TEXT, "tiny_a"), frames), before)


def test_wake_refuses_a_checkpoint_that_changed(make_driver: MakeDriver, checkpoint: Path) -> None:
    """Weights that were replaced during sleep would contradict what the stage told of itself."""
    driver = make_driver(model=checkpoint)
    driver.engine.sleep(2)
    weights = checkpoint / "consolidated.safetensors"
    data = bytearray(weights.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    weights.write_bytes(data)

    with pytest.raises(CheckpointDamaged, match="changed while the stage slept"):
        driver.engine.wake()


def test_cache_that_memory_cannot_hold_stops_the_start(make_driver: MakeDriver) -> None:
    """A budget beyond the machine's memory is an out-of-memory error that names the settings to lower."""
    with pytest.raises(StageOutOfMemory, match=r"lower engine\.cache_bytes or engine\.max_sequences"):
        make_driver(engine={"cache_bytes": 2**60, "max_positions": 2**20, "max_sequences": 1024}, threads=1)


def test_entry_point_explains_itself() -> None:
    """`python -m services.thinker --help` finds the engine and the stage runtime."""
    done = subprocess.run(
        [sys.executable, "-m", "services.thinker", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "--stage" in done.stdout
