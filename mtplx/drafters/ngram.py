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
    """

    name = "ngram"
    needs_hidden = False

    def __init__(self, *, longest: int = 5, shortest: int = 2, per_token: int = 3):
        self.longest = longest
        self.shortest = shortest
        self.per_token = per_token
        self.tokens: list[int] = []
        # n-gram -> index of the token that followed its latest occurrence
        self._next: dict[tuple[int, ...], int] = {}

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Index the n-grams that the new tokens follow."""
        for token in tokens:
            here = len(self.tokens)
            for n in range(self.shortest, min(self.longest, here) + 1):
                self._next[tuple(self.tokens[here - n :])] = here
            self.tokens.append(int(token))

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        """Copy on from the best match."""
        match = self.match(depth)
        if match is None:
            return Draft([], [])
        rows = [SparseDistribution.one_hot(t, proposal.vocab_size) for t in match.tokens]
        return Draft(match.tokens, rows, self.name)

    def match(self, most: int) -> Match | None:
        """The best match, with at most so many tokens to copy from it."""
        for n in range(min(self.longest, len(self.tokens)), self.shortest - 1, -1):
            at = self._next.get(tuple(self.tokens[-n:]))
            if at is not None:
                most = min(most, self.per_token * (n - self.shortest + 1))
                return Match(n, self._copied(at, most))
        return None

    def _copied(self, at: int, count: int) -> list[int]:
        """A copy may run into its own drafts and repeat."""
        known = len(self.tokens)
        drafts: list[int] = []
        for i in range(at, at + count):
            drafts.append(self.tokens[i] if i < known else drafts[i - known])
        return drafts
