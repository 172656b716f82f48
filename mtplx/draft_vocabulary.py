"""A reduced vocabulary for drafts: fewer ids, a smaller output head, cheaper drafts, still exact.

The draft law lives on these ids, and on one more where a copy would give it, and is 0 elsewhere.
Verification takes q as the law that drafts were drawn from, whatever its support, so nothing else
knows of the reduction.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, MutableMapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .distribution import SparseDistribution


class DraftVocabulary:
    """Some ids of a vocabulary, ascending but for a joined one; index i stands for ids[i].

    Raises ``ValueError`` unless the ids are ascending, distinct and within the vocabulary.
    """

    def __init__(self, ids: ArrayLike, vocab_size: int):
        found: NDArray[np.int64] = np.asarray(ids).astype(np.int64)
        inside = found.ndim == 1 and found.size and found[0] >= 0 and found[-1] < vocab_size
        if not inside or (np.diff(found) <= 0).any():
            raise ValueError(f"draft ids are not ascending ids within [0, {vocab_size})")
        self.ids = found
        self.vocab_size = vocab_size
        self._index: MutableMapping[int, int] = {token: i for i, token in enumerate(found.tolist())}

    def joined(self, token: int) -> DraftVocabulary:
        """These ids and, behind them, one that is not among them."""
        more = object.__new__(DraftVocabulary)
        more.ids, more.vocab_size = np.append(self.ids, token), self.vocab_size
        more._index = ChainMap({token: self.ids.size}, self._index)
        return more

    def counts(self, counts: Mapping[int, float]) -> Counter[int]:
        """Counts by id -> counts by index; ids that are not here are left out."""
        return Counter({self._index[t]: c for t, c in counts.items() if t in self._index})

    def bias(self, bias: Mapping[int, float] | None) -> dict[int, float] | None:
        """A bias by id -> by index."""
        kept = {self._index[t]: b for t, b in (bias or {}).items() if t in self._index}
        return kept or None

    def indices(self, ids: Iterable[int]) -> list[int]:
        """Those of ``ids`` that are here, as indices."""
        return [self._index[t] for t in ids if t in self._index]

    def place(self, token: int) -> int | None:
        """The index of an id, None if it is not here."""
        return self._index.get(token)

    def widen(self, law: SparseDistribution) -> SparseDistribution:
        """A law over the indices -> the same over the whole vocabulary."""
        ids, probs = self.ids[law.token_ids], law.probs
        if ids.size > 1 and ids[-1] < ids[-2]:  # the joined one
            order = np.argsort(ids, kind="stable")
            ids, probs = ids[order], probs[order]
        return SparseDistribution.unchecked(ids, probs, self.vocab_size)
