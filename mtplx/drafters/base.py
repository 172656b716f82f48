"""The protocol of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..distribution import SparseDistribution
from ..draft_vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Draft:
    """A draft block: K ids, and for each the law it was drawn from (one-hot if it was copied).

    source: the name of the drafter that made it, if another one was asked.
    """

    tokens: list[int]
    q_rows: list[SparseDistribution]
    source: str = ""


def _always(confidences: Sequence[float]) -> bool:
    return True


@dataclass(frozen=True)
class Proposal:
    """What a drafter may use to draw tokens.

    law: (logits (vocab,) or (1, vocab), drafts so far, the ids that the logits are of, or None for
    all) -> q, processed as the target's p would be; None where nothing can be drafted.
    draw: (offset in the block, q) -> token id, by the request's randomness.
    vocab_size: of the trunk.
    more: q(x) of each token placed in this block so far -> whether a drafter that draws is to draw
    another one. It is asked before every draw, and before what a draw costs is spent.
    """

    law: Callable[[mx.array, Sequence[int], DraftVocabulary | None], SparseDistribution | None]
    draw: Callable[[int, SparseDistribution], int]
    vocab_size: int
    more: Callable[[Sequence[float]], bool] = _always


class Drafter(Protocol):
    """Proposes the next tokens of one sequence. It sees committed tokens only.

    name: as in the statistics.  needs_hidden: whether ``observe`` wants the trunk's hidden states.
    """

    name: str
    needs_hidden: bool

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Take note of newly committed tokens, in order.

        hidden: (n, D), the trunk's hidden states that have become known, in order: there is one
        for every committed token but the last. None where ``needs_hidden`` is false.
        """

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        """At most ``depth`` draft tokens after everything observed. May be fewer, or none.

        Leaves no trace of the draft behind: whatever was written for it has been taken back when
        this returns, or raises.
        """


class NoDrafter:
    """Plain decoding: never a draft."""

    name = "none"
    needs_hidden = False

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        """Nothing to note."""

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        """An empty draft."""
        return Draft([], [])
