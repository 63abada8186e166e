"""What of a request's codes is audio, which windows share a pass, and whole requests decoded at once."""

from __future__ import annotations

import random

import pytest
import torch

from services.codec.model import CodecDecoder
from services.codec.windows import (
    MAX_PADDING,
    PIECE_FRAMES,
    Batching,
    CodeFacts,
    decode_batch,
    describe_bad_codes,
    inspect_codes,
    plan_passes,
)

END_FRAME = torch.tensor([[1, 2, 2, 2, 2, 2, 2]])


def test_codes_end_at_the_first_end_of_audio(decoder: CodecDecoder, random_codes) -> None:
    """Frames before the first END_AUDIO count; what comes after is not even looked at."""
    codes = random_codes(4)
    after = torch.cat([codes, END_FRAME, torch.full((3, 7), -5), END_FRAME])

    facts = inspect_codes([codes, after, END_FRAME, codes[:0]], decoder.params)

    assert facts == [CodeFacts(4, None), CodeFacts(4, None), CodeFacts(0, None), CodeFacts(0, None)]
    assert inspect_codes([], decoder.params) == []


@pytest.mark.parametrize(
    ("book", "code", "limit"),
    [(0, 0, 95), (0, 96, 95), (0, -1, 95), (3, 0, 22), (3, 1, 22), (6, 23, 22), (6, 2**31, 22)],
)
def test_codes_that_are_no_real_ones_are_found(
    decoder: CodecDecoder, random_codes, book: int, code: int, limit: int
) -> None:
    """The special codes and those beyond a codebook, by frame, and told by codebook with the range."""
    codes = random_codes(5)
    codes[3, book] = code

    (facts,) = inspect_codes([codes], decoder.params)

    assert facts == CodeFacts(5, 3)
    text = f"frame 3 has code {code} in codebook {book}; real codes there are 2 to {limit}"
    assert describe_bad_codes(codes, 3, decoder.params) == text
    assert describe_bad_codes(codes[3:], 0, decoder.params).startswith("frame 0 ")


def test_largest_real_codes_are_decoded(decoder: CodecDecoder) -> None:
    """2 to 1 + size of the codebook is the whole range."""
    codes = torch.tensor([[95, *[22] * 6], [2] * 7])

    assert inspect_codes([codes], decoder.params) == [CodeFacts(2, None)]
    assert torch.isfinite(decoder(codes[None])).all()


def test_alone_means_one_window_for_each_pass() -> None:
    """Also of equal length; windows without a frame are in none."""
    assert plan_passes([5, 0, 5, 7], Batching(alone=True)) == [[0], [2], [3]]


def test_windows_of_one_length_share_a_pass_up_to_its_limits() -> None:
    """At most max_windows and max_frames for each pass."""
    assert plan_passes([50] * 5, Batching(max_windows=2)) == [[0, 1], [2, 3], [4]]
    assert plan_passes([50] * 5, Batching(max_frames=150)) == [[0, 1, 2], [3, 4]]
    assert plan_passes([200, 10], Batching(max_frames=150)) == [[0], [1]]
    assert plan_passes([], Batching()) == []


def test_windows_of_unlike_length_share_a_pass_if_little_is_padding() -> None:
    """A short window does not get padded to a long one; neighbours in length do."""
    assert plan_passes([5, 50, 48, 6], Batching()) == [[1, 2], [3, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_passes_hold_every_window_once_and_keep_the_limits(seed: int) -> None:
    """Whatever lengths come."""
    pick = random.Random(seed)
    lengths = [pick.choice([0, 1, 5, 10, 30, 50, pick.randint(1, 400)]) for _ in range(pick.randint(0, 60))]
    batching = Batching(max_windows=pick.randint(1, 32), max_frames=pick.randint(1, 2000))

    passes = plan_passes(lengths, batching)

    assert sorted(at for group in passes for at in group) == [at for at, length in enumerate(lengths) if length]
    for group in passes:
        frames = len(group) * max(lengths[at] for at in group)
        assert len(group) <= batching.max_windows
        assert len(group) == 1 or frames <= batching.max_frames
        assert frames - sum(lengths[at] for at in group) <= MAX_PADDING * frames


def test_nothing_is_decoded_for_empty_requests(decoder: CodecDecoder) -> None:
    """No request, or only empty ones: empty float32 waveforms on the host."""
    assert decode_batch(decoder, []) == []

    waves = decode_batch(decoder, [END_FRAME, END_FRAME[:0]])

    assert [(wave.shape, wave.dtype) for wave in waves] == [((0,), torch.float32)] * 2


@pytest.mark.parametrize("frames", [PIECE_FRAMES, PIECE_FRAMES + 1, 2 * PIECE_FRAMES + 3])
def test_pieces_fit_together_without_a_seam(decoder: CodecDecoder, random_codes, frames: int) -> None:
    """At every cut the samples are those of a decode in one piece, also in a batch with others."""
    codes, other = random_codes(frames), random_codes(30, seed=1)

    waves = decode_batch(decoder, [other, codes])

    torch.testing.assert_close(waves[1], decoder(codes[None])[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(waves[0], decoder(other[None])[0], atol=1e-5, rtol=1e-5)


def test_a_bad_code_names_its_request(decoder: CodecDecoder, random_codes) -> None:
    """Before anything is decoded."""
    codes = random_codes(3)
    codes[1, 2] = 99

    with pytest.raises(ValueError, match="request 1: frame 1 has code 99 in codebook 2; real codes there are 2 to 22"):
        decode_batch(decoder, [random_codes(2), codes])
