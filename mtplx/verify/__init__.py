"""Verification: how many draft tokens are kept, and which token follows them.

Three rules, one interface. Given the target rows p, the rows q the drafts were drawn from, and the
draws of the request, a rule returns a ``Verdict``. The kept tokens followed by ``next_token`` have
the joint law of plain decoding; ``coupled`` even gives the tokens of plain decoding themselves.

A block ends at its first end-of-sequence token: nothing after it is kept and no bonus is drawn.
A round without drafts is plain decoding under every rule, one RACE draw from the only row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ..distribution import Distribution
from .block import verify_block
from .coupled import verify_coupled
from .token import verify_token
from .verdict import Randomness, Verdict

__all__ = ["RULES", "Randomness", "Rule", "Verdict", "verify"]


class Rule(Protocol):
    """What a rule of verification is called with; see ``verify``."""

    def __call__(
        self,
        p_rows: Sequence[Distribution],
        q_rows: Sequence[Distribution],
        draft: Sequence[int],
        draws: Randomness,
        start: int,
        eos_ids: Collection[int],
    ) -> Verdict:
        """Judge a non-empty block."""


RULES: dict[str, Rule] = {
    "token": verify_token,
    "block": verify_block,
    "coupled": verify_coupled,
}


def verify(
    rule: str,
    p_rows: Sequence[Distribution],
    q_rows: Sequence[Distribution],
    draft: Sequence[int],
    draws: Randomness,
    *,
    start: int,
    eos_ids: Collection[int] = (),
) -> Verdict:
    """Judge one draft block x1..xK.

    rule: a key of ``RULES``.  p_rows: K + 1 target rows; row i is the law after x1..xi.
    q_rows: K rows; row i is the law x(i+1) was drawn from.  draft: K ids.  draws: the request's
    randomness.  start: absolute position of x1.  eos_ids: ids that end the output.

    Raises ``ValueError`` for an unknown rule or a wrong number of rows. Pure: nothing is changed.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; there are {', '.join(sorted(RULES))}")
    if len(p_rows) != len(draft) + 1 or len(q_rows) != len(draft):
        raise ValueError(
            f"{len(draft)} drafts need {len(draft) + 1} p rows and {len(draft)} q rows,"
            f" not {len(p_rows)} and {len(q_rows)}"
        )
    if not draft:
        return Verdict(0, draws.race(start, p_rows[0]), ())
    return RULES[rule](p_rows, q_rows, draft, draws, start, eos_ids)
