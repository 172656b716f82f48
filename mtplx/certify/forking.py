"""Noise that forks: a play with the shipped functions, over every outcome of its draws.

Only the noise is replaced, below ``Draws``: ``rng.race`` and ``rng.uniform`` fork the play instead
of computing an outcome. Noise is known by its Threefry key and position, so draws with equal keys
are one random variable and draws with different keys are independent:

* races of at most three tokens: the noise (E_1, E_2, E_3), divided by its sum, is uniform on a
  triangle. A race argmin E/p cuts it by lines through E_a p_v = E_v p_a, so what several races have
  told of one noise is a convex polygon, and the chance of the next winner a ratio of areas. Exact.
* races of more: a noise may be raced twice, by the closed form of two races.
* coins: what comparisons have told of one uniform is an interval, cut where acceptance flips.

While a play runs, nothing else in the process may draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import rng
from ..distribution import Distribution, Floats, support, vocab_size_of

T = TypeVar("T")
Point = tuple[float, ...]
Polygon = tuple[Point, ...]

TRIANGLE: Polygon = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
# Comparisons u q < p are played this near to where they flip, on either side.
NEAR = 1e-14


class ImpossibleError(Exception):
    """A play did what no exact decoder does, whatever the laws."""


def _area(polygon: Polygon) -> float:
    if len(polygon) < 3:
        return 0.0
    (x0, y0, _), total = polygon[0], 0.0
    for (x1, y1, _), (x2, y2, _) in itertools.pairwise(polygon[1:]):
        total += (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)
    return abs(total) / 2


def _clip(polygon: Polygon, side: Callable[[Point], float]) -> Polygon:
    """The part of a convex polygon where the linear ``side`` is >= 0."""
    out: list[Point] = []
    values = [side(point) for point in polygon]
    for i, (point, value) in enumerate(zip(polygon, values, strict=True)):
        before, value_before = polygon[i - 1], values[i - 1]
        if (value >= 0) != (value_before >= 0):
            t = value_before / (value_before - value)
            out.append(tuple(a + t * (b - a) for a, b in zip(before, point, strict=True)))
        if value >= 0:
            out.append(point)
    return tuple(out)


@lru_cache(maxsize=1 << 16)
def _cut(polygon: Polygon, ids: tuple[int, ...], probs: Point) -> list[tuple[float, Any]]:
    """The winners of a race and the parts of ``polygon`` where they win: (share, (id, part))."""
    if len(ids) == 1:
        return [(1.0, (ids[0], polygon))]
    outcomes = []
    for a, p in zip(ids, probs, strict=True):
        part = polygon
        for v, other in zip(ids, probs, strict=True):
            if v != a:
                part = _clip(part, lambda e, v=v, p=p, o=other, a=a: e[v] * p - e[a] * o)  # type: ignore[misc]
        outcomes.append((_area(part) / _area(polygon), (a, part)))
    total = sum(share for share, _ in outcomes)
    if abs(total - 1.0) > 1e-9:
        raise ImpossibleError(f"the winners of a race share {total} of it")
    return [(share / total, o) for share, o in outcomes if share > 1e-14]


@lru_cache(maxsize=1 << 12)
def joint_of_two_races(q: Point, p: Point) -> Floats:
    """(V, V): P(argmin E/q = a, argmin E/p = b), integrated piece by piece.

    With E_a = s, E_b = r s: integral over r of (1 + r + sum_c max(q_c/q_a, r p_c/p_b))^-2.
    """
    out = np.zeros((len(q), len(q)))
    for a, b in itertools.product(np.flatnonzero(q), np.flatnonzero(p)):
        if a == b:
            out[a, a] = 1 / sum(max(x / q[a], y / p[a]) for x, y in zip(q, p, strict=True))
            continue
        rest = [(q[c] / q[a], p[c] / p[b]) for c in range(len(q)) if c not in (a, b)]
        low, high = q[b] / q[a], p[b] / p[a] if p[a] else np.inf
        knees = [x / y for x, y in rest if y and low < x / y < high]
        marks = sorted({low, high, *knees}) if low < high else []
        for left, right in itertools.pairwise(marks):
            inside = right if np.isfinite(right) else left + 1
            inside = (left + inside) / 2
            flat = [x >= inside * y for x, y in rest]
            at = 1 + sum(x for (x, _), f in zip(rest, flat, strict=True) if f)
            slope = 1 + sum(y for (_, y), f in zip(rest, flat, strict=True) if not f)
            end = at + slope * left
            if np.isfinite(right):
                out[a, b] += (right - left) / (end * (at + slope * right))
            else:
                out[a, b] += 1 / (slope * end)
    return out


@dataclass
class Noise:
    """One path of the play: what is known of every random variable, and how likely it is.

    flips: where the coins that are tossed next flip, in that order; whoever plays announces them.
    """

    script: list[int] = field(default_factory=list)
    weight: float = 1.0
    taken: int = 0
    known: dict[Any, Any] = field(default_factory=dict)
    flips: list[float] = field(default_factory=list)

    def fork(self, outcomes: Sequence[tuple[float, T]]) -> T:
        """Take the scripted outcome, the last one where the script ends."""
        outcomes = [o for o in outcomes if o[0] > 0.0]
        if self.taken == len(self.script):
            self.script.append(len(outcomes) - 1)
        weight, outcome = outcomes[self.script[self.taken]]
        self.taken += 1
        self.weight *= weight
        return outcome

    def race(self, key: rng.Key, position: int, law: Distribution) -> int:
        """In place of ``rng.race``."""
        ids, probs = support(law)
        size = vocab_size_of(law)
        if size > 3:
            return self._race_of_many(key, position, ids, probs, size)
        polygon = self.known.get((key, position), TRIANGLE)
        winner, part = self.fork(_cut(polygon, tuple(ids.tolist()), tuple(probs.tolist())))
        self.known[key, position] = part
        return int(winner)

    def _race_of_many(
        self, key: rng.Key, position: int, ids: NDArray[np.int64], probs: Floats, size: int
    ) -> int:
        law = np.zeros(size)
        law[ids] = probs
        before = self.known.get((key, position))
        self.known[key, position] = "raced twice"
        if before is None:
            winner = self.fork([(share, token) for token, share in enumerate(law.tolist())])
            self.known[key, position] = (tuple(law.tolist()), winner)
            return winner
        if before == "raced twice":
            raise ImpossibleError("one noise decided three races")
        first, winner = before
        shares = joint_of_two_races(first, tuple(law.tolist()))[winner]
        return self.fork([(s, token) for token, s in enumerate((shares / shares.sum()).tolist())])

    def uniform(self, key: rng.Key, position: int, token_id: int) -> float:
        """In place of ``rng.uniform``: one uniform, below the next announced flip, or above."""
        low, high = self.known.get((key, position), (0.0, 1.0))
        # A coin that nobody announced may be cut anywhere: it decides nothing, or it shows.
        flip = min(max(self.flips.pop(0) if self.flips else 0.5, low), high)
        halves = [
            ((flip - low) / (high - low), (low, flip)),
            ((high - flip) / (high - low), (flip, high)),
        ]
        interval = self.fork(halves)
        self.known[key, position] = interval
        if interval[1] == flip and flip > low:
            return min(flip * (1 - NEAR), 1 - 2.0**-53)
        return max(flip * (1 + NEAR), 2.0**-53)


@contextmanager
def swapped(module: ModuleType, **functions: Any) -> Iterator[None]:
    """Functions of a module replaced, by name, for as long as the context lasts."""
    shipped = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in shipped.items():
            setattr(module, name, function)


def play_all(play: Callable[[Noise], T]) -> Iterator[tuple[float, T]]:
    """(weight, result) of every path of ``play``."""
    script: list[int] | None = []
    while script is not None:
        noise = Noise(script=list(script))
        with swapped(rng, race=noise.race, uniform=noise.uniform):
            result = play(noise)
        yield noise.weight, result
        script = noise.script
        while script and script[-1] == 0:
            script.pop()
        script = [*script[:-1], script[-1] - 1] if script else None
