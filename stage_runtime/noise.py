"""Counter-based normal noise: what a request gets depends on its seed and on where it is, never on who shares the batch.

Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), made on the host so that every device
gets the same numbers. To reproduce value number n of (seed, index) elsewhere:

1. key = (low, high 32 bits of seed); counter = (low, high 32 bits of index, low, high 32 bits of the block n // 4).
2. Ten Philox rounds give four words w0..w3; each becomes u = (w + 0.5) / 2**32, strictly between 0 and 1.
3. Box-Muller on (u0, u1) gives values 0 and 1 of the block, on (u2, u3) values 2 and 3:
   r = sqrt(-2 ln u0), a = 2 pi u1: r cos a, then r sin a. All in float64, rounded to float32 at the very end.

Knows numpy only; callers cast to the dtype of their run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint64]  # 32-bit words held in 64 bits, so that products keep their upper half

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)  # for counter words 0 and 2
# What is added to key words 0 and 1 in each round.
_ROUND_STEPS = np.outer(np.arange(_ROUNDS, dtype=np.uint64), np.array([0x9E3779B9, 0xBB67AE85], np.uint64))
_WORDS_PER_BLOCK = 4
_LIMIT = 2**64


def normals(seeds: Sequence[int], indices: Sequence[int], count: int) -> npt.NDArray[np.float32]:
    """Standard normal values, one row for each pair of seed and index; row r depends on seeds[r] and indices[r] alone.

    A smaller `count` gives the first values of a larger one.

    Args:
        seeds: Seed of each row, 0 to 2**64 - 1.
        indices: Place within the seed's stream of each row, such as a frame or step, 0 to 2**64 - 1.
        count: Values of a row, at least 0.

    Returns:
        Array [rows, count], float32.

    Raises:
        ValueError: The lengths differ, or a number is out of range.
    """
    if len(seeds) != len(indices):
        raise ValueError(f"there are {len(seeds)} seeds for {len(indices)} indices")
    if count < 0:
        raise ValueError(f"count is {count}; it must be at least 0")
    keys = _split(seeds, "seed")[:, :, None]  # (2, rows, 1)
    blocks = -(-count // _WORDS_PER_BLOCK)
    counter = np.empty((4, len(seeds), blocks), np.uint64)
    counter[:2] = _split(indices, "index")[:, :, None]
    counter[2:] = _split(range(blocks), "block")[:, None, :]
    uniform = (philox(counter, keys).astype(np.float64) + 0.5) * 2.0**-32  # (4, rows, blocks)
    radius = np.sqrt(-2.0 * np.log(uniform[0::2]))
    angle = (2.0 * np.pi) * uniform[1::2]
    values = np.empty((len(seeds), blocks, 2, 2), np.float32)  # rows, blocks, pair of words, cosine and sine
    values[..., 0] = (radius * np.cos(angle)).transpose(1, 2, 0)
    values[..., 1] = (radius * np.sin(angle)).transpose(1, 2, 0)
    return values.reshape(len(seeds), blocks * _WORDS_PER_BLOCK)[:, :count]


def philox(counter: _Words, key: _Words) -> _Words:
    """Philox4x32 with ten rounds.

    Args:
        counter: Words 0 to 3 along axis 0, (4, ...), each below 2**32.
        key: Words 0 and 1 along axis 0, (2, ...), each below 2**32, of as many axes, broadcast against the counter.

    Returns:
        Random words 0 to 3 along axis 0, (4, ...), each below 2**32.
    """
    ones = (1,) * (key.ndim - 1)
    steps = _ROUND_STEPS.reshape(_ROUNDS, 2, *ones)
    multipliers = _MULTIPLIERS.reshape(2, *ones)
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + steps) & _LOW:
        products = (even * multipliers)[::-1]  # word 2's product goes to words 0 and 1, word 0's to words 2 and 3
        even = (products >> _SHIFT) ^ odd ^ round_key
        odd = products & _LOW
    words = np.empty_like(counter)
    words[0::2], words[1::2] = even, odd
    return words


def _split(values: Sequence[int], name: str) -> _Words:
    """Low and high 32 bits of each value, (2, values)."""
    for value in values:
        if not 0 <= value < _LIMIT:
            raise ValueError(f"{name} is {value}; it must be 0 to 2**64 - 1")
    wide = np.array(values, np.uint64)
    return np.stack([wide & _LOW, wide >> _SHIFT])
