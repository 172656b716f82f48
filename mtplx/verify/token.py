"""The token rule: each draft is judged by its own coin.

Leviathan, Kalman, Matias 2023 (arXiv 2211.17192, algorithm 1); Chen et al. 2023 (arXiv 2302.01318,
algorithm 2). x_i is kept iff u q(x_i) < p(x_i). At the first rejection the recovered token is drawn
from (p - q)+ normalised; if all are kept, the bonus token from the last p row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..distribution import Distribution, _probability
from ..sampling import accepts, chance, residual_distribution
from .verdict import Randomness, Verdict


def verify_token(
    p_rows: Sequence[Distribution],
    q_rows: Sequence[Distribution],
    draft: Sequence[int],
    draws: Randomness,
    start: int,
    eos_ids: Collection[int],
) -> Verdict:
    """Judge a block by the token rule; arguments as in ``verify.verify``."""
    chances: list[float] = []
    for i, token in enumerate(draft):
        p, q = _probability(p_rows[i], token), _probability(q_rows[i], token)
        chances.append(chance(p, q))
        if not accepts(draws.accept(start, i), p, q):
            recovered = draws.residual(start + i, residual_distribution(p_rows[i], q_rows[i]))
            return Verdict(i, recovered, tuple(chances))
        if token in eos_ids:
            return Verdict(i + 1, None, tuple(chances))
    bonus = draws.bonus(start + len(draft), p_rows[len(draft)])
    return Verdict(len(draft), bonus, tuple(chances))
