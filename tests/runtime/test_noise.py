"""stage_runtime.noise: the generator against published vectors, and what makes its noise independent of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stage_runtime.noise import normals, philox

# Known answers published with Random123 for philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(name: str) -> None:
    """The three published vectors come out, alone and as one column among others."""
    counter, key, expected = (np.array(words, np.uint64)[:, None] for words in KNOWN_ANSWERS[name])

    alone = philox(counter, key)
    among = philox(np.concatenate([counter ^ np.uint64(5), counter], axis=1), key)

    np.testing.assert_array_equal(alone, expected)
    np.testing.assert_array_equal(among[:, 1:], expected)


def test_values_follow_the_documented_recipe() -> None:
    """Each value equals the recipe of the module's docstring, worked out with plain Python numbers from the words."""
    seed, index = 0x0123456789ABCDEF, 0xFEDCBA9876543210

    values = normals([seed], [index], 11)[0]

    for number, value in enumerate(values):
        block = number // 4
        counter = np.array([index & 0xFFFFFFFF, index >> 32, block, 0], np.uint64)[:, None]
        words = philox(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)[:, None])[:, 0]
        first, second = ((int(word) + 0.5) / 2**32 for word in words[number % 4 // 2 * 2 :][:2])
        wave = math.cos if number % 2 == 0 else math.sin
        assert value == pytest.approx(math.sqrt(-2 * math.log(first)) * wave(2 * math.pi * second), rel=1e-6)


def test_values_stay_as_they_are() -> None:
    """The first values of a seed never change from release to release: recorded outputs stay reproducible."""
    values = normals([1234], [0], 4)[0]

    np.testing.assert_allclose(values, [1.2291553, -1.6164905, 0.46462113, -1.5605406], rtol=1e-6)


def test_moments_are_those_of_a_normal_distribution() -> None:
    """Mean, variance, skewness, kurtosis, and the shares beyond one and three sigma of a million values fit."""
    values = normals([7] * 10, list(range(10)), 100_000).astype(np.float64).reshape(-1)

    assert values.mean() == pytest.approx(0, abs=4e-3)
    assert values.var() == pytest.approx(1, abs=6e-3)
    assert (values**3).mean() == pytest.approx(0, abs=1.2e-2)
    assert (values**4).mean() == pytest.approx(3, abs=4e-2)
    assert (abs(values) > 1).mean() == pytest.approx(0.317311, abs=2e-3)
    assert (abs(values) > 3).mean() == pytest.approx(0.002700, abs=2.5e-4)
    assert np.isfinite(values).all()


def test_rows_are_uncorrelated() -> None:
    """Neighbouring seeds, neighbouring indices and neighbouring values have no correlation."""
    rows = normals([5, 6, 5], [0, 0, 1], 100_000).astype(np.float64)

    matrix = np.corrcoef(rows)
    assert abs(matrix[np.triu_indices(3, 1)]).max() < 0.015
    assert abs(np.corrcoef(rows[0, 0::2], rows[0, 1::2])[0, 1]) < 0.015


def test_rows_do_not_depend_on_the_batch() -> None:
    """Each row of a batch has exactly the bits that it has alone, in any order."""
    seeds = [0, 1, 2**32, 2**64 - 1, 42, 42]
    indices = [0, 2**40, 3, 7, 5, 6]

    together = normals(seeds, indices, 37)
    backwards = normals(seeds[::-1], indices[::-1], 37)[::-1]

    assert (together == backwards).all()
    for row, seed, index in zip(together, seeds, indices, strict=True):
        assert (normals([seed], [index], 37)[0] == row).all()
    assert len({row.tobytes() for row in together}) == len(seeds)


def test_fewer_values_are_a_prefix_of_more() -> None:
    """A smaller count gives the first values of a larger one, bit for bit."""
    whole = normals([9, 8], [1, 2], 100)

    for count in (0, 1, 2, 3, 4, 5, 36, 99):
        part = normals([9, 8], [1, 2], count)
        assert part.shape == (2, count)
        assert (part == whole[:, :count]).all()


def test_seed_and_index_use_all_64_bits() -> None:
    """Seeds or indices that differ in their upper half only give other values."""
    rows = normals([1, 1 + 2**32, 1, 1], [1, 1, 1 + 2**32, 1 + 2**63], 8)

    assert len({row.tobytes() for row in rows}) == 4


def test_no_rows_give_an_empty_array() -> None:
    """No seeds give an array without rows."""
    assert normals([], [], 5).shape == (0, 5)


@pytest.mark.parametrize(
    ("seeds", "indices", "count", "text"),
    [
        ([-1], [0], 1, "seed is -1"),
        ([2**64], [0], 1, "seed is 18446744073709551616"),
        ([0], [-3], 1, "index is -3"),
        ([0], [0], -1, "count is -1"),
        ([0, 1], [0], 1, "2 seeds for 1 indices"),
    ],
    ids=["negative seed", "wide seed", "negative index", "negative count", "lengths"],
)
def test_numbers_out_of_range_are_refused(seeds: list[int], indices: list[int], count: int, text: str) -> None:
    """A seed, index or count out of range, or unequal lengths, is an error that names the value."""
    with pytest.raises(ValueError, match=text):
        normals(seeds, indices, count)
