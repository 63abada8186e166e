"""The chunk plan: the golden schedules, and what holds for every plan: each frame leaves once, in order, as early as planned."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from services.router.chunks import Chunk, ChunkPlan, plan_chunk

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "voxtral" / "chunk_plan.json"
PLANS = {"default_25_5_25": ChunkPlan(5, 25, 25), "cfg_10_2_21": ChunkPlan(2, 10, 21)}


def schedule(frames: int, plan: ChunkPlan, *, end_with_frame: bool = True, step: int = 1) -> list[tuple[int, int, int]]:
    """(frames so far, ctx, new) of each chunk of a request whose frames arrive `step` at a time.

    The end comes with the last frames, or after them on its own.
    """
    found: list[tuple[int, int, int]] = []
    sent = 0
    arrivals = [(min(made, frames), end_with_frame and made >= frames) for made in range(step, frames + step, step)]
    for made, finished in [*arrivals, (frames, True)]:
        while (chunk := plan_chunk(made, sent, finished=finished, plan=plan)) is not None:
            sent += chunk.new
            found.append((made, chunk.ctx, chunk.new))
    return found


def golden_cases() -> list[tuple[str, int, list[tuple[int, int, int]]]]:
    """Plan name, number of frames, schedule."""
    tree = json.loads(GOLDEN.read_text())
    return [(name, int(n), [tuple(row) for row in rows]) for name, cases in tree.items() for n, rows in cases.items()]


def test_schedules_are_the_golden_ones() -> None:
    """For both plans and every number of frames, the end coming with the last frame."""
    cases = golden_cases()
    assert {name for name, _, _ in cases} == set(PLANS)

    for name, frames, expected in cases:
        assert schedule(frames, PLANS[name]) == expected, f"{name}, {frames} frames"


@pytest.mark.parametrize("name", PLANS)
def test_an_end_without_a_frame_sends_only_what_is_left(name: str) -> None:
    """Nothing leaves twice when the end arrives by itself, whether or not a chunk was just sent."""
    for _, frames, expected in (case for case in golden_cases() if case[0] == name):
        found = schedule(frames, PLANS[name], end_with_frame=False)
        assert found == expected, f"{frames} frames"
        assert sum(new for _, _, new in found) == frames


def test_no_frame_is_lost_where_the_sizes_do_not_fit() -> None:
    """First chunks of 4 and chunks of 25: the last short chunk is cut to one frame, and frame 25 leaves."""
    plan = ChunkPlan(4, 25, 25)

    found = schedule(80, plan)

    assert [new for _, _, new in found] == [4] * 6 + [1, 25, 25, 5]
    assert [made for made, _, _ in found] == [4, 8, 12, 16, 20, 24, 25, 50, 75, 80]


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_sends_each_frame_once(seed: int) -> None:
    """However frames arrive: sizes within the plan, context as much as there is up to the plan's, nothing left at the end."""
    pick = random.Random(seed)
    chunk = pick.randint(1, 40)
    plan = ChunkPlan(pick.randint(1, chunk), chunk, pick.randint(0, 40))
    frames = pick.randint(0, 150)

    found = schedule(frames, plan, end_with_frame=pick.random() < 0.5, step=pick.randint(1, 30))

    sent = 0
    for at, (made, ctx, new) in enumerate(found):
        assert ctx == min(sent, plan.context_frames)
        limit = plan.chunk_frames if sent >= plan.chunk_frames else plan.first_chunk_frames
        assert 1 <= new <= limit
        sent += new
        assert sent <= made
        assert new == limit or sent in {plan.chunk_frames, frames}, f"chunk {at} is short without reason"
    assert sent == frames


def test_nothing_leaves_before_a_chunk_is_full() -> None:
    """Between chunks the answer is None, and asking again does not change it."""
    plan = PLANS["default_25_5_25"]

    assert plan_chunk(0, 0, finished=False, plan=plan) is None
    assert plan_chunk(4, 0, finished=False, plan=plan) is None
    assert plan_chunk(5, 0, finished=False, plan=plan) == Chunk(ctx=0, new=5)
    assert plan_chunk(49, 25, finished=False, plan=plan) is None
    assert plan_chunk(50, 25, finished=False, plan=plan) == Chunk(ctx=25, new=25)


def test_a_request_without_a_frame_sends_nothing() -> None:
    """The end alone makes no chunk."""
    assert plan_chunk(0, 0, finished=True, plan=PLANS["default_25_5_25"]) is None


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((5, 0, 25), "chunk_frames is 0; it must be at least 1"),
        ((5, -3, 25), "chunk_frames is -3; it must be at least 1"),
        ((0, 25, 25), "first_chunk_frames is 0; it must be 1 to chunk_frames, 25"),
        ((26, 25, 25), "first_chunk_frames is 26; it must be 1 to chunk_frames, 25"),
        ((5, 25, -1), "context_frames is -1; it must be at least 0"),
    ],
)
def test_plans_that_make_no_sense_are_refused(sizes: tuple[int, int, int], text: str) -> None:
    """With the size at fault, its value and its range."""
    with pytest.raises(ValueError, match=text):
        ChunkPlan(*sizes)


@pytest.mark.parametrize(("made", "sent"), [(3, 4), (3, -1)])
def test_impossible_counts_are_refused(made: int, sent: int) -> None:
    """More sent than made, or less than nothing."""
    with pytest.raises(ValueError, match=f"{sent} frames were sent of {made} made"):
        plan_chunk(made, sent, finished=False, plan=PLANS["default_25_5_25"])
