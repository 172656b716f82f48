"""Drafts from where they pay most, as many as pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from ..depth import COPY_LIMIT, AdaptiveDepth, CopyDepth, Costs
from .base import Draft, Drafter, Proposal
from .ngram import Match, NgramDrafter


class AutoDrafter:
    """A head, an n-gram drafter or both; each round, the one that promises more per cost drafts.

    Which one is settled before either draws a token, from committed tokens and earlier rounds.
    """

    def __init__(self, mtp: Drafter | None, ngram: NgramDrafter | None, costs: Costs):
        held: list[Drafter] = [part for part in (mtp, ngram) if part is not None]
        self.name = held[0].name if len(held) == 1 else "auto"
        self.needs_hidden = any(part.needs_hidden for part in held)
        self.mtp, self.ngram, self._held = mtp, ngram, held
        self.mtp_depth, self.ngram_depth = AdaptiveDepth(costs), CopyDepth(costs)
        # The round that has not been judged yet: what the head drafted, what could be copied.
        self._open: tuple[Draft, Match] | None = None

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Learn from the round that these end, and let both drafters take note."""
        if tokens and self._open is not None:
            (draft, match), self._open = self._open, None
            judged = list(zip(draft.tokens, draft.q_rows, tokens, strict=False))
            kept = next((i for i, (x, _, y) in enumerate(judged) if x != y), len(judged))
            self.mtp_depth.observe([q.probability(x) for x, q, _ in judged], kept)
            self.ngram_depth.observe(match.length, match.tokens, tokens)
        for part in self._held:
            part.observe(tokens, hidden if part.needs_hidden else None)

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        """See ``Drafter.propose``."""
        found = None if self.ngram is None else self.ngram.match(min(depth, COPY_LIMIT))
        match = found or Match(0, [])
        copying = self.ngram_depth.best(match.length, len(match.tokens))
        drafting = self.mtp_depth.best(0 if self.mtp is None else depth)
        drafted = Draft([], [])
        if self.ngram is not None and copying.rate > drafting.rate:
            draft = self.ngram.propose(copying.depth, proposal)
        elif self.mtp is not None:
            most = min(depth, self.mtp_depth.limit)
            drafted = draft = self.mtp.propose(most, replace(proposal, more=self.mtp_depth.more))
        else:
            draft = drafted
        self._open = drafted, match
        return draft
