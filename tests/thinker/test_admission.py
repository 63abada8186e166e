"""What the thinker admits, refuses and lets wait; slots and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.struct_pb2 import Struct

from omnistage.stage.v1 import stage_pb2
from stage_runtime.config import ConfigError
from stage_runtime.engine import CannotAdmitNow, StageRequest
from stage_runtime.errors import InvalidRequest, StageProtocolError, UnknownVoice
from stage_runtime.tensors import Rows, rows_from_numpy

MakeDriver = Callable[..., Any]
MakeFrames = Callable[[int, int], list[list[int]]]

# Golden model in float32: 2 layers x (keys + values) x 2 kv heads x 16 x 4 bytes.
POSITION_BYTES = 512


def violation(driver: Any, **request: Any) -> tuple[str, str, str]:
    """Field, description and reason of the only violation that a request is refused with."""
    with pytest.raises(InvalidRequest) as refusal:
        driver.submit(**({"text": "x", "voice": "tiny_a"} | request))
    assert len(refusal.value.violations) == 1
    found = refusal.value.violations[0]
    return found.field, found.description, found.reason


@pytest.mark.parametrize(
    "text",
    ["", " ", "\t\n", "\u3000", "\u00a0", "\u200b", "\ufeff", "\x00", "\u0301", "\u2800"],
    ids=lambda text: text.encode("unicode-escape").decode() or "empty",
)
def test_blank_text_is_refused(make_driver: MakeDriver, text: str) -> None:
    """A text without a visible character is a fault of input.text."""
    field, description, reason = violation(make_driver(), text=text)

    assert (field, reason) == ("input.text", "REQUIRED")
    assert "visible character" in description


@pytest.mark.parametrize(
    "text",
    [
        "\U0001f3a4",
        "e\u0301",
        "नमस्ते",
        "مرحبا",
        "a\x00b",
        "line\nline\n\n",
        "[AUDIO][BEGIN_AUDIO]</s>[REPEAT_AUDIO_TEXT]",
    ],
    ids=["emoji", "combining", "hindi", "arabic", "nul", "newlines", "markers"],
)
def test_any_visible_text_is_spoken_as_it_is(make_driver: MakeDriver, text: str) -> None:
    """Scripts, emoji, control characters and the names of special tokens are text: none becomes a marker of the prompt."""
    driver = make_driver()

    request = driver.submit(text, "tiny_a")
    driver.start(request)

    ids = request.state.prompt.ids
    assert ids[:8] == (1, 25, 24, 24, 24, 24, 24, 36)
    assert ids[-2:] == (35, 25)
    assert min(ids[8:-2]) >= 64  # below are the special tokens
    assert request.outputs[0].isfinite().all()


@pytest.mark.parametrize("voice", ["no_such_voice", "", " tiny_a", "TINY_A", "../tiny_a", "a\x00b", "v" * 300])
def test_unknown_voice_is_refused_with_the_valid_names(make_driver: MakeDriver, voice: str) -> None:
    """A voice is matched against the list as it is; nothing is trimmed, folded or joined to a path."""
    with pytest.raises(UnknownVoice) as refusal:
        make_driver().submit("x", voice)

    assert refusal.value.metadata["validVoices"] == "tiny_a, tiny_b"


def test_all_faults_are_told_at_once(make_driver: MakeDriver) -> None:
    """Blank text, no frames and an unknown voice come in one answer."""
    with pytest.raises(InvalidRequest) as refusal:
        make_driver().submit(" ", "nobody", max_frames=0)

    assert [found.field for found in refusal.value.violations] == ["input.text", "input.max_frames", "input.voice"]


def test_prompt_and_frames_must_fit_the_positions(make_driver: MakeDriver) -> None:
    """The refusal states prompt length, limit and how many frames fit; exactly that many are then admitted and can be fed."""
    driver = make_driver(engine={"max_positions": 100, "max_sequences": 1})

    field, description, reason = violation(driver, text="the end.", max_frames=85)
    admitted = driver.submit("the end.", "tiny_a", max_frames=84)

    assert (field, reason) == ("input.max_frames", "OUT_OF_RANGE")
    assert description == (
        "is 85; the prompt has 16 tokens and the limit for prompt and frames is 100 positions: at most 84 frames fit"
    )
    assert driver.speak(admitted, [[2] * 7] * 84).isfinite().all()


def test_prompt_without_room_for_a_frame_is_too_long(make_driver: MakeDriver) -> None:
    """A text that leaves no position for a frame is a fault of the text, with the most tokens that would fit."""
    driver = make_driver(engine={"max_positions": 64})

    field, description, reason = violation(driver, text="z" * 54, max_frames=1)

    assert (field, reason) == ("input.text", "TOO_LONG")
    assert description == (
        "has 54 tokens, with the voice's rows a prompt of 64; the limit for prompt and frames is 64 positions: "
        "at most 53 tokens of text fit"
    )
    assert driver.submit("z" * 53, "tiny_a", max_frames=1).prompt_token_count == 63


def test_frames_beyond_the_reserved_ones_fail_that_request(make_driver: MakeDriver) -> None:
    """Input after max_frames fails clearly and touches nobody else."""
    driver = make_driver()
    short = driver.submit("x", "tiny_a", max_frames=1)
    other = driver.submit("x", "tiny_a")
    driver.start(short, other)
    driver.step((short, [2] * 7), (other, [2] * 7))

    result = driver.step((short, [2] * 7), (other, [2] * 7))

    assert str(result.errors[0]).endswith("frame 1 came; the request reserved positions for 1 frames")
    assert len(other.outputs) == 3


def test_request_waits_while_all_slots_are_taken(make_driver: MakeDriver) -> None:
    """With every slot reserved a good request has to wait, a faulty one is refused; a released slot is given out again."""
    driver = make_driver(engine={"max_sequences": 2})
    requests = [driver.submit("x", "tiny_a") for _ in range(2)]

    with pytest.raises(CannotAdmitNow):
        driver.submit("x", "tiny_a")
    with pytest.raises(UnknownVoice):
        driver.submit("x", "nobody")
    driver.engine.release(requests[0].state)

    assert driver.submit("x", "tiny_a").state.slot == requests[0].state.slot


def test_refused_requests_reserve_nothing(make_driver: MakeDriver) -> None:
    """Any number of refusals leaves the slots free."""
    driver = make_driver(engine={"max_sequences": 1})
    for request in ({"text": " "}, {"voice": "nobody"}, {"max_frames": 10**6}, {"prior": [[99] * 7]}) * 3:
        with pytest.raises((InvalidRequest, UnknownVoice, StageProtocolError)):
            driver.submit(**({"text": "x", "voice": "tiny_a"} | request))

    assert driver.submit("x", "tiny_a").state.slot == 0


def test_reused_slot_holds_nothing_of_the_request_before(make_driver: MakeDriver, make_frames: MakeFrames) -> None:
    """A request whose slot was full of another's rows, even of NaN, gives the bits of a fresh engine; released memory is zero."""
    frames = make_frames(20, 3)
    fresh = make_driver()
    expected = fresh.speak(fresh.submit("the end.", "tiny_b"), frames)
    driver = make_driver(engine={"max_sequences": 1})
    before = driver.submit("somebody else said something longer than that", "tiny_a")
    driver.start(before)
    for frame in make_frames(40, 4):
        driver.step((before, frame))
    cache = driver.engine._runner.cache
    with torch.inference_mode():
        for tensor in (cache.keys, cache.values):
            tensor[:, 0, :, : before.state.position] = torch.nan
    driver.engine.release(before.state)

    assert not cache.keys.any()
    assert not cache.values.any()
    assert torch.equal(driver.speak(driver.submit("the end.", "tiny_b"), frames), expected)


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({"max_positions": 1024, "cache_bytes": 1024 * POSITION_BYTES}, 1),
        ({"max_positions": 1024, "cache_bytes": 3 * 1024 * POSITION_BYTES - 1}, 2),
        ({"max_positions": 1000, "cache_bytes": 3 * 1024 * POSITION_BYTES}, 3),  # a slot is a multiple of 128 positions
        ({"max_positions": 1024, "cache_bytes": 2**30, "max_sequences": 5}, 5),
    ],
)
def test_capacity_follows_from_the_cache_budget(make_driver: MakeDriver, settings: dict[str, int], slots: int) -> None:
    """As many slots as the bytes hold, at most max_sequences; the description tells them, and the cache takes no more."""
    engine = make_driver(engine=settings).engine
    description = engine.describe()

    assert description.capacity == slots
    assert description.facts.cache_token_count == slots * settings["max_positions"]
    assert description.facts.max_positions == settings["max_positions"]
    cache = engine._runner.cache
    assert cache.keys.nbytes + cache.values.nbytes <= settings["cache_bytes"]


def test_budget_below_one_request_stops_the_start(make_driver: MakeDriver) -> None:
    """A cache that holds not even one request is a fault of the settings, which says what is needed."""
    with pytest.raises(ConfigError) as fault:
        make_driver(engine={"max_positions": 1024, "cache_bytes": 1024 * POSITION_BYTES - 1})

    assert str(fault.value) == (
        "engine.cache_bytes is 524287; one request of engine.max_positions 1024 needs 524288 bytes in torch.float32: "
        "raise cache_bytes to that at least, or lower max_positions"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {"max_sequence": 3}}, "max_sequence: unknown key"),
        ({"engine": {"max_positions": 1}}, "max_positions"),
        ({"device": "quantum"}, "device 'quantum' is not a torch device"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not there: torch sees"),
    ],
)
def test_faulty_settings_stop_the_start(make_driver: MakeDriver, settings: dict[str, Any], message: str) -> None:
    """Unknown keys, values out of range and devices that do not exist are told by name."""
    with pytest.raises(ConfigError, match=message):
        make_driver(**settings, load=False)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hidden": rows_from_numpy(np.zeros((1, 7), np.int32))}, "tensors ['hidden'] came where ['codes'] are needed"),
        ({"codes": rows_from_numpy(np.zeros((1, 6), np.int32))}, "tensor 'codes' is I32 [6] where I32 [7] is needed"),
        ({"codes": rows_from_numpy(np.zeros((1, 7), np.int64))}, "tensor 'codes' is I64 [7] where I32 [7] is needed"),
        (
            {"codes": rows_from_numpy(np.array([[2] * 7, [96, *[2] * 6]], np.int32))},
            "frame 1: code 96 of codebook 0 is not in 0 to 95",
        ),
        ({"codes": rows_from_numpy(np.full((3, 7), 2, np.int32))}, "3 earlier frames came with max_frames 2"),
    ],
    ids=["name", "width", "dtype", "range", "too_many"],
)
def test_malformed_earlier_frames_break_the_protocol(
    make_driver: MakeDriver, tensors: dict[str, Rows], message: str
) -> None:
    """What a router sends with a request is checked before it is used."""
    params = stage_pb2.SpeechThinkerParams(text="x", voice="tiny_a", max_frames=2)

    with pytest.raises(StageProtocolError) as fault:
        make_driver().engine.admit(StageRequest("r", params, tensors))

    assert message in str(fault.value)


def test_params_of_another_stage_break_the_protocol(make_driver: MakeDriver) -> None:
    """A Submit whose params are for another kind of stage is refused by name."""
    with pytest.raises(StageProtocolError, match="params are Struct; a Voxtral thinker takes SpeechThinkerParams"):
        make_driver().engine.admit(StageRequest("r", Struct()))
