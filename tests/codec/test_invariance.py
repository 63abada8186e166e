"""Samples depend on the window alone: to the bit with batch_invariant, within a tolerance without it. Streams equal whole decodes."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.codec.model import left_reach_frames
from services.router.chunks import ChunkPlan, plan_chunk

# Sums in another order: what float32 leaves of samples of about 1.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}

IN_ANOTHER_PROCESS = """
import hashlib, sys, torch
from pathlib import Path
from services.codec.engine import create_engine
from omnistage.stage.v1 import stage_pb2
from stage_runtime.config import StageSettings
from stage_runtime.engine import StageRequest, Work
from stage_runtime.tensors import rows_from_numpy
torch.set_num_threads(1)
engine = create_engine(StageSettings(kind="voxtral.codec", addresses=("unix:none",), model=Path(sys.argv[1]), dtype=sys.argv[3]))
engine.load()
digest = hashlib.sha256()
for codes in reversed(torch.load(sys.argv[2])):
    params = stage_pb2.SpeechCodecParams(first_chunk_frames=1, chunk_frames=300)
    state = engine.admit(StageRequest("x", params)).state
    rows = rows_from_numpy(codes.to(torch.int32).numpy(), row_counts=[len(codes)])
    digest.update(engine.step([Work(state, 0, {"codes": rows})]).tensors["pcm"].data)
print(digest.hexdigest(), end="")
"""

LENGTHS = (5, 10, 30, 50, 50, 17, 1, 50)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_partners_place_or_order(make_driver, random_codes, dtype: str) -> None:
    """Alone, in batches of every size, backwards, at every place, as partners join and leave, after other lengths: all bits agree."""
    driver = make_driver(dtype=dtype)
    windows = [(random_codes(length, seed=at), min(25, length // 2)) for at, length in enumerate(LENGTHS)]
    reference = [driver.decode(*window) for window in windows]
    count = len(windows)
    batches = [list(range(size)) for size in range(1, count + 1)]
    batches.append(list(reversed(range(count))))
    batches += [[3] * place + [4] + [7] * (3 - place) for place in range(4)]  # equal lengths, row 4 at every place
    batches += [[3, 0, 4], [0, 4], [4, 7, 6], [7]]  # joining and leaving

    for places in batches:
        streams = [driver.open() for _ in places]
        driver.step(*((stream, *windows[place]) for stream, place in zip(streams, places, strict=True)))
        for stream, place in zip(streams, places, strict=True):
            assert torch.equal(stream.pcm, reference[place]), f"window {place} in {places}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_process(make_driver, random_codes, model: Path, tmp_path: Path, dtype: str) -> None:
    """Another process, which decodes the windows in another order, makes the same bits."""
    driver = make_driver(dtype=dtype)
    windows = [random_codes(length, seed=at) for at, length in enumerate(LENGTHS)]
    digest = hashlib.sha256()
    for codes in reversed(windows):
        digest.update(driver.decode(codes).numpy().tobytes())
    torch.save(windows, tmp_path / "windows.pt")

    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(model), str(tmp_path / "windows.pt"), dtype]
    other = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).resolve().parents[2])

    assert other.stdout == digest.hexdigest()


def test_without_batch_invariant_batches_agree_within_rounding(make_driver, random_codes) -> None:
    """Padding and partners change nothing beyond the order of sums."""
    driver = make_driver(batch_invariant=False)
    windows = [(random_codes(length, seed=at), min(25, length // 2)) for at, length in enumerate(LENGTHS)]
    streams = [driver.open() for _ in windows]

    driver.step(*((stream, *window) for stream, window in zip(streams, windows, strict=True)))

    for stream, window in zip(streams, windows, strict=True):
        torch.testing.assert_close(stream.pcm, driver.decode(*window), **TOLERANCE)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_streams_of_any_plan_are_the_whole_decode(
    make_driver, decoder, random_codes, seed: int, *, batch_invariant: bool
) -> None:
    """Three requests of other lengths and plans share steps; each one's samples put together are a decode in one piece."""
    pick = random.Random(seed)
    driver = make_driver(batch_invariant=batch_invariant)
    reach = left_reach_frames(decoder.params)
    waiting = []
    for request in range(3):
        chunk = pick.randint(1, 40)
        plan = ChunkPlan(pick.randint(1, chunk), chunk, pick.randint(reach, 40))
        codes = random_codes(pick.randint(1, 90), seed=10 * seed + request)
        stream = driver.open(plan.first_chunk_frames, plan.chunk_frames, plan.context_frames)
        waiting.append((stream, codes, chunks_of(len(codes), plan)))
    requests = list(waiting)

    while waiting:
        batch = pick.sample(waiting, pick.randint(1, len(waiting)))
        driver.step(*((stream, *window(codes, chunks.pop(0))) for stream, codes, chunks in batch))
        waiting = [entry for entry in waiting if entry[2]]

    for stream, codes, _ in requests:
        torch.testing.assert_close(stream.pcm, decoder(codes[None])[0], **TOLERANCE)


def test_less_context_than_the_reach_shows(driver, decoder, random_codes) -> None:
    """With the reach that the engine tells as context the samples are those of the whole decode, with half of it they are not."""
    reach = left_reach_frames(decoder.params)
    codes = random_codes(reach + 10)
    whole = decoder(codes[None])[0][-5 * 1920 :]

    enough, less = (driver.decode(codes[-context - 5 :], context) for context in (reach, reach // 2))

    assert (enough - whole).abs().max() < 1e-5
    assert (less - whole).abs().max() > 1e-4


def chunks_of(frames: int, plan: ChunkPlan) -> list[tuple[int, int, int]]:
    """(end, context, new) of each chunk of a request whose frames come one by one."""
    found, sent = [], 0
    for made in range(1, frames + 1):
        while (chunk := plan_chunk(made, sent, finished=made == frames, plan=plan)) is not None:
            sent += chunk.new
            found.append((sent, chunk.ctx, chunk.new))
    return found


def window(codes: torch.Tensor, chunk: tuple[int, int, int]) -> tuple[torch.Tensor, int]:
    """Codes and context count of a chunk."""
    end, context, new = chunk
    return codes[end - new - context : end], context
