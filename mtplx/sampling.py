"""The law of mtplx: what a row of logits means, and when a draft may be kept.

This is the reference, in NumPy float64; everything else is measured against it. From logits to
probabilities, in this order:

1. tokens that are not allowed carry a logit of -inf already;
2. ``logit_bias`` is added;
3. the repetition penalty (prompt and output tokens), then presence and frequency penalties
   (output tokens only);
4. softmax(logits / temperature), or all mass on the first highest logit at temperature <= 0;
5. top-p, top-k and min-p, each judged on the *unfiltered* probabilities of step 4, intersected;
6. what is left is normalised.

mlx-lm's own sampler filters before it applies the temperature, so its top-p and min-p keep other
sets than ours whenever the temperature is not 1.

Words: ``p`` is the target distribution of a position, ``q`` the law a draft token was drawn from.
The acceptance rule and its residual are those of Leviathan, Kalman, Matias 2023
(arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .distribution import (
    Distribution,
    Floats,
    Ids,
    SparseDistribution,
    _probability,
    as_dense,
    excess,
    inverse_cdf,
    same_vocabulary,
    vector,
)
from .errors import NonFiniteLogitsError
from .penalties import apply_penalties, processed_logits
from .sampler_config import SamplerConfig

__all__ = [
    "Distribution",
    "NonFiniteLogitsError",
    "SamplerConfig",
    "SparseDistribution",
    "SpeculativeDecision",
    "acceptance_probability",
    "apply_penalties",
    "apply_top_k_top_p",
    "apply_top_p_top_k",
    "deterministic_top_k_order",
    "distribution_from_logits",
    "residual_distribution",
    "sample_from_distribution",
    "softmax",
    "speculative_output_marginal",
    "verify_one_token",
]

# --- from logits to p -------------------------------------------------------------------------


def require_finite_row(logits: NDArray[np.floating], where: str = "softmax") -> None:
    """Raise ``NonFiniteLogitsError`` for a (vocab,) row with NaN, +inf, or nothing above -inf."""
    nan, inf = int(np.isnan(logits).sum()), int(np.isposinf(logits).sum())
    if nan or inf:
        message = f"{where}: {nan} NaN and {inf} +inf among {logits.size} logits"
        raise NonFiniteLogitsError(
            message, nan_count=nan, inf_count=inf, vocab_size=int(logits.size)
        )
    if np.isneginf(logits).all():
        message = f"{where}: all {logits.size} logits are -inf: no token is allowed"
        raise NonFiniteLogitsError(
            message, nan_count=0, inf_count=int(logits.size), vocab_size=int(logits.size)
        )


def softmax(logits: ArrayLike, temperature: float = 1.0) -> Floats:
    """Probabilities of logits / temperature; one-hot at the first argmax if temperature <= 0.

    logits: (vocab,); returns (vocab,) float64. Raises ``NonFiniteLogitsError`` at every
    temperature for NaN, +inf or an all -inf row, ``ValueError`` if not 1-D or for a temperature
    that is not finite.
    """
    row = vector(logits, "logits")
    if not isfinite(temperature):
        raise ValueError(f"temperature must be finite, not {temperature!r}")
    require_finite_row(row)
    if temperature <= 0:
        hot = np.zeros_like(row)
        hot[int(np.argmax(row))] = 1.0
        return hot
    weights = tempered_weights(row, float(row.max()), temperature)
    return weights / weights.sum()


def tempered_weights(logits: Floats, highest: float, temperature: float) -> Floats:
    """exp((logits - highest) / temperature), temperature > 0: subtracting first cannot overflow."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp((logits - highest) / temperature)


def deterministic_top_k_order(values: ArrayLike, top_k: int) -> Ids:
    """Ids of the ``top_k`` highest values: value descending, then id ascending.

    values: (n,); ``top_k`` is clamped to [0, n]. NaN ranks last. Raises ``ValueError`` if not 1-D.
    """
    negated = -np.asarray(values, dtype=np.float64)
    if negated.ndim != 1:
        raise ValueError(f"values must be 1-D, not of shape {negated.shape}")
    count = min(max(int(top_k), 0), negated.size)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    # The stable sort of ids that are ascending already keeps ties in id order.
    cutoff = np.partition(negated, count - 1)[count - 1]
    ids = np.arange(negated.size) if np.isnan(cutoff) else np.flatnonzero(negated <= cutoff)
    return ids[np.argsort(negated[ids], kind="stable")][:count].astype(np.int64, copy=False)


def kept_in_order(probs: Floats, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """Which of ``probs``, given in descending order from the first, top-p and min-p keep.

    A token stays while the mass before it is < top_p (so the token that crosses stays), and
    while it is >= min_p times the highest. Either is off at top_p outside (0, 1), min_p = 0.
    """
    keep = np.ones(probs.size, dtype=bool)
    if 0.0 < top_p < 1.0:
        before = np.cumsum(probs)
        keep[1:] = before[:-1] < top_p
    if min_p > 0.0:
        keep &= probs >= min_p * probs[0]
    return keep


def _filtered(probs: Floats, rank_by: Floats, top_p: float, top_k: int, min_p: float) -> Floats:
    limited = 0 < top_k < probs.size
    order = deterministic_top_k_order(rank_by, top_k if limited else probs.size)
    ids = order[kept_in_order(probs[order], top_p, min_p)]
    out = np.zeros_like(probs)
    out[ids] = probs[ids]
    return out / out.sum()


def apply_top_p_top_k(probs: ArrayLike, top_p: float = 1.0, top_k: int = 0) -> Floats:
    """Keep the nucleus of mass ``top_p`` and the ``top_k`` highest, intersected; normalise.

    probs: (n,) probabilities; both filters are judged on them, ties go to the lower id. ``top_k``
    outside 0 < k < n and ``top_p`` outside 0 < p < 1 are off. Never an empty support. Nucleus:
    Holtzman et al. 2020 (arXiv 1904.09751). Raises ``NonFiniteLogitsError`` without positive,
    finite mass, ``ValueError`` if not 1-D or negative.
    """
    row = vector(probs, "probs")
    if (row < 0).any():
        raise ValueError("probs must not be negative")
    if not 0.0 < row.sum() < np.inf:
        raise NonFiniteLogitsError("probs have no positive, finite mass", vocab_size=row.size)
    if not 0.0 < top_p < 1.0 and not 0 < (top_k or 0) < row.size:
        return row / row.sum()
    return _filtered(row, row, float(top_p), int(top_k or 0), 0.0)


def apply_top_k_top_p(probs: ArrayLike, top_k: int = 0, top_p: float = 1.0) -> Floats:
    """``apply_top_p_top_k`` with its arguments in the other order: the result is the same."""
    return apply_top_p_top_k(probs, top_p=top_p, top_k=top_k)


def distribution_from_logits(
    logits: ArrayLike,
    config: SamplerConfig,
    *,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
    prompt_ids: Iterable[int] | None = None,
) -> Floats:
    """The law: ``p`` of one position, (vocab,) float64, from its logits, (vocab,).

    token_counts: output token id -> times emitted so far. prompt_ids: seen by the repetition
    penalty only. penalty_overlay: id -> amount subtracted. Filters rank by logit, which is the
    order of the tempered probabilities before rounding.

    Raises ``NonFiniteLogitsError`` for NaN, +inf or an all -inf row (after bias and penalties
    too) at every temperature; ``ValueError`` for an id outside the vocabulary.
    """
    return law_of_processed(
        processed_logits(logits, config, token_counts, penalty_overlay, prompt_ids), config
    )


def law_of_processed(row: Floats, config: SamplerConfig) -> Floats:
    """Steps 4 to 6 of the law: (vocab,) logits with bias and penalties applied -> (vocab,)."""
    probs = softmax(row, config.temperature)
    filters = config.top_p < 1.0 or 0 < config.top_k < row.size or config.min_p > 0.0
    if config.temperature <= 0 or not filters:
        return probs
    return _filtered(probs, row, config.top_p, config.top_k, config.min_p)


# --- one draft token against p ----------------------------------------------------------------


def accepts(uniform: float, p: float, q: float) -> bool:
    """Whether a draft token of probabilities p and q is kept, ``uniform`` in [0, 1): u q < p."""
    return uniform * q < p


def chance(p: float, q: float) -> float:
    """min(1, p/q); where q is 0: 1 if p > 0, else 0."""
    if not p > 0.0:
        return 0.0
    return min(1.0, p / q) if q > 0.0 else 1.0


def acceptance_probability(target_p: Distribution, draft_q: Distribution, token_id: int) -> float:
    """min(1, p/q) of one token; where q is 0: 1 if p > 0, else 0."""
    return chance(_probability(target_p, token_id), _probability(draft_q, token_id))


def residual_distribution(target_p: Distribution, draft_q: Distribution) -> Distribution:
    """(p - q)+ normalised: the law of the recovered token; see ``scaled_residual``."""
    return scaled_residual(target_p, draft_q, 1.0)


def scaled_residual(target_p: Distribution, draft_q: Distribution, scale: float) -> Distribution:
    """(scale p - q)+ normalised. Sparse if both are, else dense.

    NaN terms count as 0. Without any mass (p = q) it is the target; without a target either,
    ``ValueError``. No epsilon: it would put mass where p has none.
    """
    size = same_vocabulary(target_p, draft_q)
    if isinstance(target_p, SparseDistribution) and isinstance(draft_q, SparseDistribution):
        ids, mass = excess(target_p, draft_q, scale)
        return SparseDistribution.unchecked(ids, mass / mass.sum(), size) if ids.size else target_p
    p = as_dense(target_p)
    for candidate in (scale * p - as_dense(draft_q), p):
        mass = np.where(np.isfinite(candidate) & (candidate > 0.0), candidate, 0.0)
        if mass.sum() > 0.0:
            return mass / mass.sum()
    raise ValueError("the target distribution has no mass")


def sample_from_distribution(probs: Distribution, rng: np.random.Generator | None = None) -> int:
    """One token id: one uniform of ``rng``, inverse CDF in ascending id order.

    Dense and sparse forms of one law give the same token for the same generator state. ``rng``
    defaults to a fresh one. Raises ``ValueError`` for negative weights and
    ``NonFiniteLogitsError`` without positive, finite mass.
    """
    uniform = (np.random.default_rng() if rng is None else rng).random()
    return inverse_cdf(probs, float(uniform))


@dataclass(frozen=True)
class SpeculativeDecision:
    """Whether the draft token was kept, the token emitted, and min(1, p/q)."""

    accepted: bool
    token_id: int
    accept_probability: float


def verify_one_token(
    target_p: Distribution,
    draft_q: Distribution,
    draft_token: int,
    rng: np.random.Generator | None = None,
) -> SpeculativeDecision:
    """Keep ``draft_token``, drawn from q, with probability min(1, p/q), else draw from (p-q)+.

    Uses one uniform of ``rng``, and a second one after a rejection. The emitted token follows p.
    """
    generator = np.random.default_rng() if rng is None else rng
    same_vocabulary(target_p, draft_q)
    p, q = _probability(target_p, draft_token), _probability(draft_q, draft_token)
    if accepts(float(generator.random()), p, q):
        return SpeculativeDecision(True, int(draft_token), chance(p, q))
    recovered = sample_from_distribution(residual_distribution(target_p, draft_q), generator)
    return SpeculativeDecision(False, recovered, chance(p, q))


def speculative_output_marginal(target_p: Distribution, draft_q: Distribution) -> Floats:
    """The exact law of the token that ``verify_one_token`` emits, (vocab,) float64.

    sum_x q(x) [a(x) 1_x + (1 - a(x)) r], a the acceptance probability and r the residual. It
    equals p whatever q is: that is what makes the rule exact.
    """
    same_vocabulary(target_p, draft_q)
    p, q = as_dense(target_p), as_dense(draft_q)
    if not p.sum() > 0.0 or not q.sum() > 0.0:
        raise ValueError("p and q need mass")
    p, q = p / p.sum(), q / q.sum()
    kept = np.array([acceptance_probability(p, q, token) for token in range(p.size)]) * q
    return kept + (1.0 - kept.sum()) * np.asarray(residual_distribution(p, q))
