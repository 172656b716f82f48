"""A law over the vocabulary: a dense float64 array, or a few ids and their probabilities."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import native
from .errors import NonFiniteLogitsError

Floats: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]


def vector(values: ArrayLike, what: str) -> Floats:
    """``values`` as (n,) float64, n >= 1; ``ValueError`` naming ``what`` otherwise."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{what} must be a non-empty 1-D array, not of shape {array.shape}")
    return array


@dataclass(frozen=True)
class SparseDistribution:
    """A distribution over ``vocab_size`` tokens that is zero outside ``token_ids``.

    token_ids: (n,) distinct ids in [0, vocab_size), n >= 1, in any order; held ascending.
    probs: (n,) weights >= 0; a weight that is not finite counts as 0. Held normalised, and only
    those that are positive then.

    Raises ``ValueError`` for a wrong shape, length, id or a negative weight, and
    ``NonFiniteLogitsError`` when no weight is positive.
    """

    token_ids: Ids
    probs: Floats
    vocab_size: int

    def __post_init__(self) -> None:
        """Check, convert to int64 and float64, order, normalise."""
        ids = np.asarray(self.token_ids, dtype=np.int64)
        probs = np.asarray(self.probs, dtype=np.float64)
        size = int(self.vocab_size)
        if ids.ndim != 1 or probs.ndim != 1:
            raise ValueError(
                f"token_ids and probs must be 1-D, not {ids.ndim}-D and {probs.ndim}-D"
            )
        if ids.size != probs.size:
            raise ValueError(f"{ids.size} token_ids but {probs.size} probs")
        if ids.size == 0:
            raise ValueError("a distribution needs at least one token")
        if (probs < 0).any():
            raise ValueError("probabilities must not be negative")
        order = np.argsort(ids, kind="stable")
        ids, probs = ids[order], probs[order]
        if ids[0] < 0 or ids[-1] >= size:
            raise ValueError(f"token ids must lie in [0, {size})")
        if (ids[1:] == ids[:-1]).any():
            raise ValueError("token ids must be distinct")
        probs = np.where(np.isfinite(probs), probs, 0.0)
        total = probs.sum()
        if not 0.0 < total < np.inf:
            raise NonFiniteLogitsError("no token has positive probability", vocab_size=size)
        probs = probs / total
        vars(self).update(token_ids=ids[probs > 0], probs=probs[probs > 0], vocab_size=size)

    @classmethod
    def unchecked(cls, token_ids: Ids, probs: Floats, vocab_size: int) -> SparseDistribution:
        """Of arrays that are known to be as they are held."""
        law = object.__new__(cls)
        vars(law).update(token_ids=token_ids, probs=probs, vocab_size=vocab_size)
        return law

    @classmethod
    def one_hot(cls, token_id: int, vocab_size: int) -> SparseDistribution:
        """All mass on one token."""
        return cls(np.array([token_id]), np.array([1.0]), vocab_size)

    def probability(self, token_id: int) -> float:
        """The probability of one token; 0 outside the support."""
        if native.loaded is not None:
            return native.loaded.probability(self.token_ids, self.probs, token_id)
        place = bisect_left(self.token_ids, token_id)
        inside = place < self.token_ids.size and self.token_ids[place] == token_id
        return float(self.probs[place]) if inside else 0.0

    def to_dense(self) -> Floats:
        """The same law as a (vocab_size,) float64 array."""
        dense = np.zeros(self.vocab_size)
        dense[self.token_ids] = self.probs
        return dense

    def __eq__(self, other: object) -> bool:
        """Equal when size, ids and probabilities are equal, bit for bit."""
        if not isinstance(other, SparseDistribution):
            return NotImplemented
        return (
            self.vocab_size == other.vocab_size
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.probs, other.probs)
        )

    __hash__ = None  # type: ignore[assignment]


Distribution: TypeAlias = Floats | SparseDistribution


def vocab_size_of(distribution: Distribution) -> int:
    """How many tokens the vocabulary has, in either form."""
    if isinstance(distribution, SparseDistribution):
        return distribution.vocab_size
    return len(distribution)


def as_dense(distribution: Distribution) -> Floats:
    """Either form as a (vocab,) float64 array."""
    if isinstance(distribution, SparseDistribution):
        return distribution.to_dense()
    return vector(distribution, "a distribution")


def _probability(distribution: Distribution, token_id: int) -> float:
    size = vocab_size_of(distribution)
    if not 0 <= token_id < size:
        raise ValueError(f"token id {token_id} is outside [0, {size})")
    if isinstance(distribution, SparseDistribution):
        return distribution.probability(token_id)
    return float(distribution[token_id])


def same_vocabulary(target_p: Distribution, draft_q: Distribution) -> int:
    """The common vocabulary size of p and q; ``ValueError`` if they differ."""
    size = vocab_size_of(target_p)
    if vocab_size_of(draft_q) != size:
        raise ValueError(f"p has {size} tokens but q has {vocab_size_of(draft_q)}")
    return size


def support(distribution: Distribution) -> tuple[Ids, Floats]:
    """Ids of positive probability, ascending, and their probabilities."""
    if isinstance(distribution, SparseDistribution):
        return distribution.token_ids, distribution.probs
    probs = np.asarray(distribution, dtype=np.float64)
    ids = np.flatnonzero(probs > 0)
    return ids, probs[ids]


def excess(p: Distribution, q: Distribution, scale: float = 1.0) -> tuple[Ids, Floats]:
    """(scale p - q)+ as ids, ascending, and positive masses; may be empty. NaN terms count as 0."""
    same_vocabulary(p, q)
    ids, mass = support(p)
    if isinstance(q, SparseDistribution):
        if native.loaded is not None:
            return native.loaded.excess(ids, mass, q.token_ids, q.probs, scale)
        place = q.token_ids.searchsorted(ids)
        found = q.token_ids.take(place, mode="clip") == ids
        mass = scale * mass - q.probs.take(place, mode="clip") * found
    else:
        mass = scale * mass - q[ids]
    keep = mass > 0.0
    return ids[keep], mass[keep]


def inverse_cdf(probs: Distribution, uniform: float) -> int:
    """The first id, ascending, at which the cumulative mass exceeds ``uniform`` in [0, 1)."""
    if not isinstance(probs, SparseDistribution):
        weights = vector(probs, "probs")
        if (weights < 0).any():
            raise ValueError("probs must not be negative")
        if np.isnan(weights).any():
            raise NonFiniteLogitsError("probs hold NaN", nan_count=int(np.isnan(weights).sum()))
    ids, weights = support(probs)
    cumulative = np.cumsum(weights)
    if not cumulative.size or not np.isfinite(cumulative[-1]):
        raise NonFiniteLogitsError("probs have no positive, finite mass")
    index = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(ids[min(int(index), ids.size - 1)])
