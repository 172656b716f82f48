"""Prompt lookup: copy what followed the last occurrence of the latest tokens.

Saxena 2023, "Prompt lookup decoding". It costs no forward and pays where the output quotes the
prompt or itself. A copied token is certain, so its q is one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..distribution import SparseDistribution
from .base import Draft, Proposal
from .index import NgramIndex


@dataclass(frozen=True)
class Match:
    """So many of the latest tokens occurred before; these followed there."""

    length: int
    tokens: list[int]


class NgramDrafter:
    """Drafts from prompt and output.

    The longest suffix of ``longest`` down to ``shortest`` tokens that occurred before decides; of
    several places, the latest. The longer the match, the more tokens are drafted: a match of n
    tokens drafts at most ``per_token`` * (n - shortest + 1).

    index: another drafter's, read here and extended there; too short a one is not used.
    """

    name = "ngram"
    needs_hidden = False

    def __init__(
        self,
        index: NgramIndex | None = None,
        *,
        longest: int = 5,
        shortest: int = 2,
        per_token: int = 3,
    ):
        shared = index if index is not None and index.longest >= longest else None
        self.index = NgramIndex(longest) if shared is None else shared
        self.longest, self.shortest, self.per_token = longest, shortest, per_token
        self._extends = shared is None

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Index the n-grams that the new tokens follow."""
        if self._extends:
            self.index.extend(tokens)

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        """Copy on from the best match."""
        match = self.match(depth)
        if match is None:
            return Draft([], [])
        rows = [SparseDistribution.one_hot(t, proposal.vocab_size) for t in match.tokens]
        return Draft(match.tokens, rows, self.name)

    def match(self, most: int) -> Match | None:
        """The best match, with at most so many tokens to copy from it."""
        found = self.index.find(shortest=self.shortest, longest=self.longest)
        if found is None:
            return None
        length, at = found
        most = min(most, self.per_token * (length - self.shortest + 1))
        return Match(length, self._copied(at, most))

    def _copied(self, at: int, count: int) -> list[int]:
        """A copy may run into its own drafts and repeat."""
        known = self.index.tokens
        drafts: list[int] = []
        for i in range(at, at + count):
            drafts.append(known[i] if i < len(known) else drafts[i - len(known)])
        return drafts
