"""Where the latest tokens occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice


class NgramIndex:
    """The tokens of a sequence, and for each n-gram of them what followed its latest occurrence.

    shortest, longest: of the n-grams, in tokens.
    """

    def __init__(self, shortest: int, longest: int):
        self.shortest = shortest
        self.longest = longest
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, each of which some n-grams are followed by."""
        for token in tokens:
            here = len(self.tokens)
            for n in range(self.shortest, min(self.longest, here) + 1):
                self._next[tuple(self.tokens[here - n :])] = here
            self.tokens.append(int(token))

    def find(self, drafts: Sequence[int] = ()) -> tuple[int, int] | None:
        """The longest suffix that occurred before: its length, and where what followed stands.

        The suffix is of the tokens and, after them, ``drafts``; it occurred among the tokens.
        """
        if self.longest < self.shortest:
            return None  # and no slice from -0 on, which is everything
        tail = [*self.tokens[-self.longest :], *drafts][-self.longest :]
        for n in range(len(tail), self.shortest - 1, -1):
            at = self._next.get(tuple(islice(tail, len(tail) - n, None)))
            if at is not None:
                return n, at
        return None
