"""Drafts from the model's own MTP head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..device import raised, rows_of
from ..distribution import SparseDistribution
from ..draft_vocabulary import DraftVocabulary
from ..errors import NonFiniteLogitsError, StateError
from ..mtp_patch import AttachedHead, cut_cache
from .base import Draft, Proposal
from .index import NgramIndex

_CHUNK = 512


class MTPDrafter:
    """Applies the head recursively, with the head's bonus for what repeats itself.

    A small head sees that a text repeats itself later than a look at the text does: the token that
    followed the latest occurrence of the latest tokens gets a bonus before q is computed. It can be
    drafted even if the head's draft vocabulary lacks it, as it does the names in a prompt.

    The head's cache holds one row a committed token but the last, (hidden i, token i + 1), each
    written once, from the trunk's hidden state. Rows of deeper steps are dropped when a proposal
    ends, kept draft or not: the trunk's hidden states replace them.

    In a chain head k of 0, 1, ... has its own cache and reads what head k - 1 gives, or what it
    reads if the head ``reads_trunk``: its row i is (output i of head k - 1, token i + k + 1), so
    the last k rows of it wait for tokens that are only drafted yet. Deeper than the chain is long,
    the last head is applied to its own output.
    """

    name = "mtp"
    needs_hidden = True

    def __init__(self, attached: AttachedHead):
        self.attached = attached
        self.caches = [head.new_cache() for head in (attached, *attached.further)]
        # Rows of committed tokens in each: what a cache holds behind them is dropped.
        self._lengths = [0] * len(self.caches)
        # Of every head behind the first: states (1, D) for it that wait for their token.
        self._waiting: list[mx.array | None] = [None] * len(self.caches)
        self.index = NgramIndex(len(attached.copy_bonus))
        # The trunk's features (n, F) of rows that the cache does not hold yet.
        self._pending: list[mx.array] = []
        # The head's hidden state (1, D) of the last committed row.
        self._last: mx.array | None = None

    @property
    def tokens(self) -> list[int]:
        """The committed tokens."""
        return self.index.tokens

    @property
    def cache(self) -> Any:
        """That of the first head."""
        return self.caches[0]

    @property
    def rows(self) -> int:
        """How many committed rows the first head's cache holds."""
        return self._lengths[0]

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Keep tokens, and hidden states until the next proposal feeds them to the head."""
        self.index.extend(tokens)
        if hidden is not None and hidden.shape[0]:
            self._pending.append(hidden)

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        """Draft up to ``depth`` tokens, each from the head's processed law."""
        if depth < 1 or not proposal.more([]):
            return Draft([], [])
        known = self.rows + sum(part.shape[0] for part in self._pending)
        if known != len(self.tokens) - 1:
            raise StateError(f"{known} hidden states are known for {len(self.tokens)} tokens")
        self._drop_drafts()  # of a proposal that was interrupted while it dropped them
        self._feed_committed()
        hidden = self._last
        if hidden is None:
            return Draft([], [])
        tokens: list[int] = []
        q_rows: list[SparseDistribution] = []
        confidences: list[float] = []
        head, drafted = self.attached, None
        try:
            while True:
                logits, vocabulary = self._logits(head, hidden, tokens)
                q = _law(proposal, logits, tokens, vocabulary)
                if q is None:
                    return Draft(tokens, q_rows, self.name)
                tokens.append(proposal.draw(len(tokens), q))
                q_rows.append(q)
                confidences.append(q.probability(tokens[-1]))
                if len(tokens) == depth or not proposal.more(confidences):
                    return Draft(tokens, q_rows, self.name)
                if len(tokens) <= len(self.attached.further):
                    head, drafted, hidden = self._next_head(drafted, tokens)
                else:
                    hidden = head.forward(hidden, mx.array(tokens[-1:]), self.caches[-1])
        finally:
            self._drop_drafts()

    def _next_head(
        self, drafted: mx.array | None, tokens: list[int]
    ) -> tuple[AttachedHead, mx.array, mx.array]:
        """The head for the draft after ``tokens``, states (n, D) for the next, its output (1, D).

        drafted: the states for it of the rows before ``tokens``, None for the first one.
        """
        place = len(tokens)
        parts = [part for part in (self._waiting[place], drafted) if part is not None]
        states, head = mx.concatenate(parts), self.attached.further[place - 1]
        out = head.forward(states, mx.array(tokens[-len(states) :]), self.caches[place])
        return head, states if head.head.reads_trunk else out, out[-1:]

    def _drop_drafts(self) -> None:
        for cache, length in zip(self.caches, self._lengths, strict=True):
            cut_cache(cache, length)

    def _logits(
        self, head: AttachedHead, hidden: mx.array, drafts: Sequence[int]
    ) -> tuple[mx.array, DraftVocabulary | None]:
        """Logits (1, V), and the ids that they are of.

        The token that a copy would give has its bonus; the ids are joined by it where they lack it.
        """
        logits, vocabulary = head.logits(hidden), self.attached.vocabulary
        found = self.index.find(drafts)
        if found is None:
            return logits, vocabulary
        length, at = found
        token = self.tokens[at]
        place = token if vocabulary is None else vocabulary.place(token)
        if vocabulary is not None and place is None:
            logits = head.joined(logits, hidden, token)
            place, vocabulary = len(vocabulary.ids), vocabulary.joined(token)
        assert place is not None
        return raised(logits, place, self.attached.copy_bonus[length - 1]), vocabulary

    def _feed_committed(self) -> None:
        """Write the rows that are new; none are if a proposal is asked for twice."""
        while self._pending:
            # An operation on a few rows takes as long as a part of the head's step: none in vain.
            part, rest = self._pending[0], self._pending[1:]
            if rest:
                part, rest = mx.concatenate(self._pending), []
            if len(part) > _CHUNK:
                part, rest = part[:_CHUNK], [part[_CHUNK:]]
            follow = self.tokens[self.rows + 1 : self.rows + 1 + len(part)]
            try:
                out = self.attached.forward(part, mx.array(follow), self.cache)
                waiting, lengths = self._feed_further(part, out)
                last = out if len(out) == 1 else rows_of(out, len(out) - 1, len(out))
                mx.eval(out, waiting)  # and with it what it was computed from: the caches' rows
            except BaseException:
                self._drop_drafts()
                raise
            # Nothing is called here, so that no interrupt comes in between.
            self._pending, self._last, self._waiting, self._lengths = rest, last, waiting, lengths

    def _feed_further(
        self, read: mx.array, out: mx.array
    ) -> tuple[list[mx.array | None], list[int]]:
        """Write the others' new rows; what waits then, and the rows of committed tokens.

        read, out: the first head's new states (n, F) and outputs (n, D).
        """
        waiting, lengths = list(self._waiting), list(self._lengths)
        lengths[0] += len(out)
        for place, head in enumerate(self.attached.further, 1):
            new, known = read if head.head.reads_trunk else out, waiting[place]
            states = new if known is None else mx.concatenate([known, new])
            waiting[place] = states[-1:]
            if len(states) == 1:
                break
            first = lengths[place] + place + 1
            follow = self.tokens[first : first + len(states) - 1]
            read = states[:-1]
            out = head.forward(read, mx.array(follow), self.caches[place])
            lengths[place] += len(read)
        return waiting, lengths


def _law(
    proposal: Proposal,
    logits: mx.array,
    tokens: Sequence[int],
    vocabulary: DraftVocabulary | None,
) -> SparseDistribution | None:
    try:
        return proposal.law(logits, tokens, vocabulary)
    except NonFiniteLogitsError as e:
        raise NonFiniteLogitsError(f"the MTP head gives {e}; `--head none` goes without it") from e
