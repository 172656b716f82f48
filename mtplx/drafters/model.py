"""Drafts from a smaller model, as in Leviathan et al. 2023 and Chen et al. 2023.

Where its vocabulary is not the trunk's, it drafts the tokens that both have: q is its law on these,
renormalised, and 0 elsewhere ("token-level intersection", Timor et al. 2025, arXiv 2502.05202).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..distribution import SparseDistribution
from ..draft_vocabulary import DraftVocabulary
from ..errors import ModelError, NonFiniteLogitsError
from ..families import Family
from ..state import Mark, State
from ..tokenizer import Tokenizer
from .base import Draft, Proposal

# Rows whose logits are computed and left: a forward of their own would cost more.
_FEW = 16
# Of the smaller vocabulary. Two that spell spaces in different ways share far less.
_LEAST_SHARED = 0.5


class SharedVocabulary:
    """What the draft model's ids are among the trunk's: tokens are one if they are spelled alike.

    theirs, ours: the spelling of each id of the trunk and of the draft model, "" where the
    tokenizer does not know an id (padding).  vocabulary: the trunk's ids that can be drafted; None
    for all, where ids and tokens are the same. Raises ``ModelError`` if too few tokens are shared.
    """

    def __init__(self, theirs: Sequence[str], ours: Sequence[str]):
        self.vocabulary: DraftVocabulary | None = None
        if list(theirs) == list(ours):
            return
        known = {text: i for i, text in enumerate(theirs) if text}
        self._theirs, self._ours = theirs, {text: i for i, text in enumerate(ours) if text}
        pairs = sorted((known[t], self._ours[t]) for t in known.keys() & self._ours.keys())
        if not pairs or len(pairs) < _LEAST_SHARED * min(len(known), len(self._ours)):
            apart = [(i, *two) for i, two in enumerate(zip(ours, theirs, strict=False))]
            first = next((f"; id {i} is {a!r} and {b!r}" for i, a, b in apart if a != b), "")
            raise ModelError(
                f"the draft model's vocabulary is another one: of its {len(self._ours)} tokens"
                f" {len(pairs)} are among the trunk's {len(known)}{first}"
            )
        self.vocabulary = DraftVocabulary([theirs_id for theirs_id, _ in pairs], len(theirs))
        self._places = mx.array([own for _, own in pairs])

    def logits(self, logits: mx.array) -> mx.array:
        """The draft model's (1, V) -> those of ``vocabulary``, in its order."""
        return logits if self.vocabulary is None else logits[:, self._places]

    def own(self, token: int) -> list[int]:
        """A token of the trunk in the draft model's: the longest ones that spell it, from the left.

        What they cannot spell is left out: it only makes drafts worse.
        """
        if self.vocabulary is None:
            return [token]
        text, found = self._theirs[token], []
        while text:
            ends = (end for end in range(len(text), 0, -1) if text[:end] in self._ours)
            end = next(ends, None)
            found += [] if end is None else [self._ours[text[:end]]]
            text = text[end or 1 :]
        return found


@lru_cache(maxsize=4)
def shared_vocabulary(trunk: Tokenizer, own: Tokenizer) -> SharedVocabulary:
    """Of two models, by their tokenizers."""
    return SharedVocabulary(*([t.token_text(i) for i in range(t.vocab_size)] for t in (trunk, own)))


class ModelDrafter:
    """Decodes with another trunk, which has a state of its own.

    The state holds committed tokens only, in the draft model's ids, each run once: the rows of
    drafts are taken back when a proposal ends, kept drafts or not.

    context: the most tokens that the draft model takes; nothing is drafted beyond it.
    """

    name = "model"
    needs_hidden = False

    def __init__(self, family: Family, shared: SharedVocabulary, context: int | None = None):
        self.state = State(family)
        self.shared = shared
        self.context = context
        # The committed tokens.
        self.ids: list[int] = []
        # Logits (1, V) after all that the state holds, and where a proposal has to go back to.
        self._next: mx.array | None = None
        self._mark: Mark | None = None

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Keep tokens until the next proposal runs them."""
        self.ids.extend(own for token in tokens for own in self.shared.own(int(token)))

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        """Draft up to ``depth`` tokens, each from the draft model's processed law."""
        most = depth if self.context is None else min(depth, self.context - len(self.ids) + 1)
        tokens: list[int] = []
        q_rows: list[SparseDistribution] = []
        if most < 1 or not self.ids or not proposal.more([]):
            return Draft(tokens, q_rows)
        self._take_back()  # of a proposal that was interrupted while it took back
        confidences: list[float] = []
        try:
            logits = self._catch_up(most - 1)
            while True:
                q = self._law(proposal, logits, tokens)
                if q is None:
                    break
                tokens.append(proposal.draw(len(tokens), q))
                q_rows.append(q)
                confidences.append(q.probability(tokens[-1]))
                if len(tokens) == most or not proposal.more(confidences):
                    break
                logits = self.state.forward(self.shared.own(tokens[-1]))[1]
        finally:
            self._take_back()
        return Draft(tokens, q_rows, self.name)

    def _catch_up(self, rows: int) -> mx.array:
        """Run the committed tokens that are new, and mark their end: at most ``rows`` may follow.

        Logits (1, V) after the last one.
        """
        new = self.ids[self.state.length :]
        if len(new) > _FEW:
            for _ in self.state.prefill(new[:-1]):
                pass
            new = new[-1:]
        if new:
            self._mark = self.state.mark(len(new))
            logits = self.state.forward(new)[1][-1:]
            mx.eval(logits)
            self._next = logits
        self._mark = self.state.mark(rows)
        assert self._next is not None
        return self._next

    def _take_back(self) -> None:
        if self._mark is not None:
            self.state.restore(self._mark)
            self._mark = None

    def _law(
        self, proposal: Proposal, logits: mx.array, drafts: Sequence[int]
    ) -> SparseDistribution | None:
        try:
            return proposal.law(self.shared.logits(logits), drafts, self.shared.vocabulary)
        except NonFiniteLogitsError as e:
            raise NonFiniteLogitsError(
                f"the draft model gives {e}; `--draft none` goes without it"
            ) from e
