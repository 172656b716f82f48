"""The coupled rule: emit the token plain decoding would emit, go on while drafts foresaw it.

Daliri, Musco, Suresh 2024 (arXiv 2408.07978). Target and draft tokens race under the same noise;
the target's winner is emitted whether or not it was drafted, so q only proposes: there is neither
a coin nor a residual, and the output is plain decoding's under the same seed, token for token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..distribution import Distribution
from ..sampling import acceptance_probability
from .verdict import Randomness, Verdict


def verify_coupled(
    p_rows: Sequence[Distribution],
    q_rows: Sequence[Distribution],
    draft: Sequence[int],
    draws: Randomness,
    start: int,
    eos_ids: Collection[int],
) -> Verdict:
    """Judge a block by the coupled rule; arguments as in ``verify.verify``."""
    chances: list[float] = []
    for i, token in enumerate(draft):
        chances.append(acceptance_probability(p_rows[i], q_rows[i], token))
        target = draws.race(start + i, p_rows[i])
        if target != token:
            return Verdict(i, target, tuple(chances))
        if token in eos_ids:
            return Verdict(i + 1, None, tuple(chances))
    following = draws.race(start + len(draft), p_rows[len(draft)])
    return Verdict(len(draft), following, tuple(chances))
