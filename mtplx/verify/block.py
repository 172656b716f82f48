"""The block rule: the whole block is judged at once, and the longest part that passes is kept.

Sun et al. 2024 (arXiv 2403.10444, algorithm 2). With P_0 = 1, P_i = min(1, P_(i-1) p(x_i)/q(x_i)),
and p', q' the rows after x_i: Z+ = sum (P_i p' - q')+, and x1..xi passes with probability
h_i = Z+ / (Z+ + 1 - P_i) (0/0 = 1); the whole block with h_K = P_K. Each length has a coin of its
own. A failed length does not stop the search: the longest one that passes, tau, is kept. Then comes
the bonus if tau = K, else a token of (P_tau p' - q')+ normalised, which is not the token rule's
residual. On average it keeps at least as many drafts as the token rule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..distribution import Distribution, _probability, excess
from ..sampling import chance, scaled_residual
from .verdict import Randomness, Verdict


def verify_block(
    p_rows: Sequence[Distribution],
    q_rows: Sequence[Distribution],
    draft: Sequence[int],
    draws: Randomness,
    start: int,
    eos_ids: Collection[int],
) -> Verdict:
    """Judge a block by the block rule; arguments as in ``verify.verify``."""
    length = next((i for i, token in enumerate(draft, 1) if token in eos_ids), len(draft))
    kept = [1.0]
    for token, p_row, q_row in zip(draft[:length], p_rows, q_rows, strict=False):
        p, q = _probability(p_row, token), _probability(q_row, token)
        kept.append(chance(kept[-1] * p, q))
    chances = [_chance(kept[i], p_rows[i], q_rows[i]) for i in range(1, length)] + kept[length:]
    # From the longest on: the coins are independent, so those of shorter ones may stay untossed.
    tau = length
    while tau and not draws.accept(start, tau - 1) < chances[tau - 1]:
        tau -= 1
    if tau < length:
        rest = scaled_residual(p_rows[tau], q_rows[tau], kept[tau])
        return Verdict(tau, draws.residual(start + tau, rest), tuple(chances))
    if draft[length - 1] in eos_ids:
        return Verdict(length, None, tuple(chances))
    return Verdict(length, draws.bonus(start + length, p_rows[length]), tuple(chances))


def _chance(kept: float, p: Distribution, q: Distribution) -> float:
    """h_i of a part with P_i = ``kept`` that the rows p and q follow."""
    above = float(excess(p, q, kept)[1].sum())
    below = above + 1.0 - kept
    return above / below if below > 0.0 else 1.0
