"""batch_invariant on a CPU: a row's bits do not depend on who shares the batch, on its place, or on the process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.acoustic.decoder import FrameDecoder, make_decoder
from services.acoustic.model import AcousticHead, FrameInputs, Frames
from services.acoustic.settings import AcousticSettings

MakeInputs = Callable[..., tuple[torch.Tensor, ...]]
ROWS = 33

IN_ANOTHER_PROCESS = """
import hashlib, sys, torch
from pathlib import Path
from services.acoustic.decoder import make_decoder
from services.acoustic.model import AcousticHead, AcousticWeights, FrameInputs
from services.acoustic.model.weights import PREFIX
from services.acoustic.settings import AcousticSettings
from services.voxtral.checkpoint import open_checkpoint
torch.set_num_threads(1)
checkpoint = open_checkpoint(Path(sys.argv[1]))
head = AcousticHead.of(AcousticWeights.from_tensors(checkpoint.load(PREFIX, torch.float32), checkpoint.params), checkpoint.params)
decoder = make_decoder(head, AcousticSettings(), batch_invariant=True)
latents = [decoder(FrameInputs(*(t[at:at + 1] for t in torch.load(sys.argv[2])))).latents for at in range(int(sys.argv[3]))]
print(hashlib.sha256(torch.cat(latents).numpy().tobytes()).hexdigest(), end="")
"""


def rows_of(inputs: tuple[torch.Tensor, ...], places: list[int]) -> FrameInputs:
    """These rows, in this order."""
    return FrameInputs(*(tensor[places] for tensor in inputs))


def assert_rows(frames: Frames, reference: list[Frames], places: list[int]) -> None:
    """Each row of `frames` has all the bits of the reference of its place."""
    for row, place in enumerate(places):
        for output, expected in zip(frames, reference[place], strict=True):
            assert torch.equal(output[row], expected[0]), f"row {row} of {len(places)}, which is row {place} alone"


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def any_head(request: pytest.FixtureRequest, make_head: Callable[..., AcousticHead]) -> AcousticHead:
    """The embedded model's head in each run dtype."""
    return make_head(request.param)


@pytest.fixture
def decoder(any_head: AcousticHead) -> FrameDecoder:
    """A batch-invariant decoder with the default settings."""
    return make_decoder(any_head, AcousticSettings(), batch_invariant=True)


def test_bits_do_not_depend_on_partners_place_or_order(
    any_head: AcousticHead, decoder: FrameDecoder, make_inputs: MakeInputs
) -> None:
    """Alone, in batches of every size, backwards, at every place, and as partners join and leave: all bits are the same."""
    inputs = make_inputs(any_head, ROWS)
    reference = [decoder(rows_of(inputs, [place])) for place in range(ROWS)]
    batches = [list(range(count)) for count in range(1, ROWS + 1)]
    batches.append(list(reversed(range(ROWS))))
    batches += [[place, *range(place)] for place in (5, 17, 31)]  # another row first
    batches += [[*range(1, 8), 0], [0, 9, 20], [9, 20], [20, 32, 9, 0]]  # joining and leaving
    batches += [[1] * place + [0] + [2] * (7 - place) for place in range(8)]  # row 0 at every place of eight

    for places in batches:
        assert_rows(decoder(rows_of(inputs, places)), reference, places)


def test_bits_do_not_depend_on_the_process(
    make_head: Callable[..., AcousticHead], make_inputs: MakeInputs, model: Path, tmp_path: Path
) -> None:
    """Another process that computes the rows one by one gets the bits of a batch here."""
    head = make_head()
    inputs = make_inputs(head, 6)
    torch.save(inputs, tmp_path / "inputs.pt")
    together = make_decoder(head, AcousticSettings(), batch_invariant=True)(FrameInputs(*inputs)).latents

    alone = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(model), str(tmp_path / "inputs.pt"), "6"],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    ).stdout

    assert alone.splitlines()[-1].endswith(hashlib.sha256(together.numpy().tobytes()).hexdigest())


def test_a_nan_next_door_changes_no_bit(any_head: AcousticHead, decoder: FrameDecoder, make_inputs: MakeInputs) -> None:
    """Rows beside one full of NaN keep their bits, and that row is told as not finite."""
    inputs = make_inputs(any_head, 4)
    reference = [decoder(rows_of(inputs, [place])) for place in range(4)]
    inputs[0][2] = float("nan")

    frames = decoder(FrameInputs(*inputs))

    assert frames.finite.tolist() == [True, True, False, True]
    keep = [0, 1, 3]
    assert_rows(Frames(*(output[keep] for output in frames)), reference, keep)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_every_setting_of_the_row_count_is_invariant(head: AcousticHead, make_inputs: MakeInputs, rows: int) -> None:
    """Whatever invariant_rows says, bits are the same alone and in a batch of 11."""
    decoder = make_decoder(head, AcousticSettings(invariant_rows=rows), batch_invariant=True)
    inputs = make_inputs(head, 11)

    reference = [decoder(rows_of(inputs, [place])) for place in range(11)]

    assert_rows(decoder(FrameInputs(*inputs)), reference, list(range(11)))


def test_row_counts_in_use_are_told(head: AcousticHead, events: Callable[[], list[dict[str, object]]]) -> None:
    """The log says which row counts were found to give the same bits."""
    decoder = make_decoder(head, AcousticSettings(), batch_invariant=True)

    (log,) = events()
    if decoder.sizes == (1,):
        assert (log["event"], log["level"]) == ("batch_invariance_without_batching", "warning")
    else:
        assert (log["event"], log["level"]) == ("batch_invariant_row_counts", "info")
        assert tuple(log["sizes"]) == decoder.sizes


def test_without_batch_invariance_nothing_is_padded(head: AcousticHead, make_inputs: MakeInputs) -> None:
    """A free decoder computes each batch as it is."""
    decoder = make_decoder(head, AcousticSettings(), batch_invariant=False)
    inputs = make_inputs(head, 5)

    frames = decoder(FrameInputs(*inputs))

    assert decoder.sizes == ()
    for output, expected in zip(frames, head.frames(*inputs), strict=True):
        assert torch.equal(output, expected)
