"""Step 1 of the law: which tokens may come next at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .distribution import SparseDistribution
from .errors import NonFiniteLogitsError

Mask = NDArray[np.bool_]


class Walker(Protocol):
    """A grammar and a place in it; ``grammar.Grammar`` is the real one."""

    name: str

    def advance(self, token: int) -> None:
        """Commit a token."""

    def mask(self, drafts: Sequence[int]) -> Mask | None:
        """(vocab,) what may follow ``drafts``; None if these do not fit themselves."""


class Constraints:
    """min_tokens, a grammar and bans, at every position of a draft block.

    eos_ids are not allowed before ``min_tokens`` tokens are there.  banned: the ids that
    ``logit_bias`` bans: the law does that, here they only tell where no token is left.
    """

    def __init__(
        self,
        *,
        eos_ids: Collection[int] = (),
        min_tokens: int = 0,
        grammar: Walker | None = None,
        banned: Iterable[int] = (),
    ):
        self.eos_ids, self.min_tokens, self.grammar = frozenset(eos_ids), min_tokens, grammar
        self.banned = sorted(banned)
        self._eos = np.array(sorted(eos_ids), dtype=np.int64)
        self._free = grammar is None and not min_tokens and not self.banned
        self._emitted = 0
        self._masks: dict[tuple[int, ...], Mask | None] = {}

    @property
    def active(self) -> bool:
        """Whether anything but a bias is masked at the next position."""
        return self.grammar is not None or self._emitted < self.min_tokens

    def append(self, token: int) -> None:
        """Take note of a committed token."""
        self._emitted += 1
        self._masks.clear()
        if self.grammar is not None and token not in self.eos_ids:
            self.grammar.advance(token)

    def mask(self, drafts: Sequence[int], vocab_size: int) -> Mask | None:
        """(vocab,) true for what may follow ``drafts``; None where that is everything.

        Nothing follows an end of sequence or what is not allowed itself: there it is None too.
        """
        if self._free:
            return None
        key = tuple(drafts)
        if key not in self._masks:
            self._masks[key] = self._mask(key, vocab_size)
        return self._masks[key]

    def _mask(self, drafts: tuple[int, ...], vocab_size: int) -> Mask | None:
        early = self._emitted + len(drafts) < self.min_tokens and self._eos.size > 0
        if not (early or self.grammar or len(self.banned) == vocab_size):
            return None
        if not self.eos_ids.isdisjoint(drafts):
            return None
        mask = np.ones(vocab_size, dtype=bool) if not self.grammar else self.grammar.mask(drafts)
        if mask is None:
            return None
        mask[self.banned] = False
        if early:
            mask[self._eos] = False
        return mask

    def usable(self, drafts: Sequence[int], q_rows: Sequence[SparseDistribution]) -> int:
        """How many drafts to verify: up to one that is not allowed, or after which nothing is.

        One that is not allowed stays, to be rejected, if it was drawn; if it is all that its q
        gives, it goes. Neither looks at what a draft that goes was drawn as, so the law stands.
        """
        if self._free:
            return len(drafts)
        for i, (token, q) in enumerate(zip(drafts, q_rows, strict=True)):
            mask = self.mask(drafts[:i], q.vocab_size)
            if mask is not None and not mask[token]:
                return i if q.token_ids.size == 1 or not mask.any() else i + 1
        return len(drafts)

    def dead_end(self, drafts: Sequence[int], vocab_size: int) -> NonFiniteLogitsError | None:
        """The error, naming what leaves no token after ``drafts``; None if some is left."""
        mask = self.mask(drafts, vocab_size)
        if mask is None or mask.any():
            return None
        at = self._emitted + len(drafts)
        names = [self.grammar.name] if self.grammar else []
        names += ["min_tokens"] * (at < self.min_tokens)
        names += ["logit_bias or banned_ids"] * bool(self.banned)
        return NonFiniteLogitsError(
            f"{' and '.join(names)}: no token is allowed at output position {at}",
            nan_count=0, inf_count=vocab_size, vocab_size=vocab_size,
        )  # fmt: skip
