"""Where the latest tokens occurred before."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """The tokens of a sequence, and for each n-gram of them what followed its latest occurrence.

    longest: of the n-grams, in tokens.

    An n-gram has an entry if what it ends with, shorter by one, has occurred twice: else it stands
    where that does. So a text has a few entries a token, however long they may be.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, each of which some n-grams are followed by."""
        known, entries, longest = self.tokens, self._next, self.longest
        for token in tokens:
            here = len(known)
            for n in range(1, min(longest, here) + 1):
                gram = tuple(known[here - n :])
                before = entries.get(gram)
                entries[gram] = here
                if before is None:
                    break
                if n < min(longest, before):  # what it had no entry for while it was the only one
                    entries.setdefault(tuple(known[before - n - 1 : before]), before)
            known.append(int(token))

    def find(
        self, drafts: Sequence[int] = (), *, shortest: int = 1, longest: int | None = None
    ) -> tuple[int, int] | None:
        """The longest suffix that occurred before: its length, and where what followed stands.

        The suffix is of the tokens and, after them, ``drafts``; it occurred among the tokens. It
        has ``shortest`` to ``longest`` tokens, by default up to the longest there are.
        """
        most = self.longest if longest is None else min(longest, self.longest)
        if most < 1:
            return None  # and no slice from -0 on, which is everything
        known = self.tokens
        tail = [*known[-most:], *drafts][-most:]
        n, at = 0, 0
        for length in range(1, len(tail) + 1):
            found = self._next.get(tuple(tail[-length:]))
            if found is None:
                break
            n, at = length, found
        while 0 < n < min(len(tail), at) and known[at - n - 1] == tail[-n - 1]:
            n += 1
        return (n, at) if n >= max(1, shortest) else None
