"""Counter-based randomness: a draw is a function of its key, and nothing is carried along.

A request's draws depend on its seed and on positions only, never on batch shape, other requests,
draft source or timing. Each purpose has its own domain, so noise that decided one thing never
decides another:

| domain   | key                                                                    |
|----------|------------------------------------------------------------------------|
| RACE     | seed, absolute position, token id                                      |
| DRAFT    | seed, stream, position of the round's first token, offset, token id    |
| ACCEPT   | seed, stream, position of the round's first token, offset              |
| RESIDUAL | seed, stream, position of the emitted token, token id                  |
| BONUS    | seed, stream, position of the emitted token, token id                  |

RACE is shared, on purpose, by plain decoding and the coupled rule. A position may be drafted again
in a later round; the round's first position never recurs, so a DRAFT or ACCEPT key never does.

Random words are Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3"), which needs only 32-bit addition, rotation and exclusive or: the
code below runs on NumPy and on MLX arrays alike and gives the same words, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import native
from .distribution import Distribution, Floats, support

Key = tuple[int, int]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF


class Domain(IntEnum):
    """What a draw decides."""

    RACE = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    BONUS = 5


def threefry2x32(key: Key, counter0: Any, counter1: Any) -> tuple[Any, Any]:
    """Two random words for each pair of counter words.

    key: two Python ints below 2^32. counter0, counter1: uint32 arrays of one shape, NumPy's or
    MLX's, not zero-dimensional. Returns two uint32 arrays of that kind and shape.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + ((keys[(block + 2) % 3] + block + 1) & _WORD)
    return x0, x1


def _fold(key: Key, x0: int, x1: int) -> Key:
    """``threefry2x32`` of one counter in Python's integers: 20 times as fast as arrays of one."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = (x0 + keys[0]) & _WORD, (x1 + keys[1]) & _WORD
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = (((x1 << rotation) | (x1 >> (32 - rotation))) & _WORD) ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & _WORD
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & _WORD
    return x0, x1


def _word(name: str, value: int, bits: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name} must be an integer in [0, 2^{bits}), not {value!r}")
    return number


@lru_cache(maxsize=4096)
def _derived(domain: int, seed: int, stream: int, offset: int) -> Key:
    key = _fold((seed >> 32, seed & _WORD), domain, offset)
    return _fold(key, stream >> 32, stream & _WORD)


def derive_key(domain: Domain, seed: int, stream: int = 0, offset: int = 0) -> Key:
    """The Threefry key of a domain; the counter is then (token id, position).

    seed, stream: in [0, 2^64).  offset: in [0, 2^32), the place in the block (DRAFT, ACCEPT).
    Raises ``ValueError`` for anything else, a float or a bool included.
    """
    words = _word("seed", seed, 64), _word("stream", stream, 64), _word("offset", offset, 32)
    return _derived(int(domain), *words)


def uniforms(key: Key, position: int, token_ids: NDArray[np.integer]) -> Floats:
    """Uniforms in (0, 1), one a token id: (k + 1/2) 2^-52, k the top 52 bits of two words."""
    if token_ids.size == 1 and token_ids.ndim == 1:
        return np.array([uniform(key, position, int(token_ids[0]))])
    counter = token_ids.astype(np.uint32)
    first, second = threefry2x32(key, counter, np.full_like(counter, position))
    k = (first.astype(np.uint64) << np.uint64(20)) | (second >> np.uint32(12))
    return (k.astype(np.float64) + 0.5) * 2.0**-52


def uniform(key: Key, position: int, token_id: int) -> float:
    """One of ``uniforms``."""
    if native.loaded is not None:
        return float(native.loaded.uniform(*key, position, token_id))
    one, two = _fold(key, token_id, position)
    return (((one << 20) | (two >> 12)) + 0.5) * 2.0**-52


def exponentials(key: Key, position: int, token_ids: NDArray[np.integer]) -> Floats:
    """Exp(1) noise, one a token id: -log(1 - u)."""
    return -np.log1p(-uniforms(key, position, token_ids))


def race(key: Key, position: int, distribution: Distribution) -> int:
    """The winner of an exponential race: argmin over the support of E(token) / p(token).

    It follows the distribution, since the minimum of Exp(p) clocks is token v with probability
    p(v); two laws raced under one key agree as often as that noise allows (Daliri, Musco,
    Suresh 2024, arXiv 2408.07978). Ties go to the lower id.
    """
    ids, probs = support(distribution)
    if ids.size == 1:
        return int(ids[0])
    if native.loaded is not None:
        return native.loaded.race(*key, position, ids, probs)
    with np.errstate(over="ignore"):  # a denormal probability: infinitely late
        return int(ids[np.argmin(exponentials(key, position, ids) / probs)])


@dataclass(frozen=True)
class Draws:
    """Every random decision of one request; see the module's table of keys.

    seed, stream: integers in [0, 2^64). Positions are absolute: the first prompt token is 0.
    """

    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        """Check the seed now rather than at the first draw."""
        derive_key(Domain.RACE, self.seed)
        derive_key(Domain.BONUS, self.seed, self.stream)

    def race(self, position: int, law: Distribution) -> int:
        """The token of plain decoding and of the coupled rule."""
        return race(derive_key(Domain.RACE, self.seed), position, law)

    def draft(self, start: int, offset: int, q: Distribution) -> int:
        """A draft token; ``start`` is the round's first position."""
        return race(derive_key(Domain.DRAFT, self.seed, self.stream, offset), start, q)

    def accept(self, start: int, offset: int) -> float:
        """The uniform in (0, 1) that judges the draft token at ``offset``."""
        key = derive_key(Domain.ACCEPT, self.seed, self.stream, offset)
        return uniform(key, start, 0)

    def residual(self, position: int, law: Distribution) -> int:
        """The token recovered at the first rejection."""
        return race(derive_key(Domain.RESIDUAL, self.seed, self.stream), position, law)

    def bonus(self, position: int, law: Distribution) -> int:
        """The token after a block that was kept whole."""
        return race(derive_key(Domain.BONUS, self.seed, self.stream), position, law)
