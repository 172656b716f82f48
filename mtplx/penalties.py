"""Steps 2 and 3 of the law: logit_bias and the penalties, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from .distribution import Floats, Ids, vector
from .sampler_config import PENALTY_MAX, PENALTY_MIN, SamplerConfig


def _checked_ids(ids: Iterable[int], size: int, what: str) -> Ids:
    array = np.fromiter(ids, dtype=np.int64)
    outside = array[(array < 0) | (array >= size)]
    if outside.size:
        raise ValueError(f"{what} has token id {int(outside[0])}, outside [0, {size})")
    return array


def penalty_amounts(
    token_counts: Mapping[int, int] | None,
    presence_penalty: float,
    frequency_penalty: float,
    penalty_overlay: Mapping[int, float] | None,
    vocab_size: int,
) -> tuple[Ids, Floats] | None:
    """What presence, frequency and overlay subtract, as (ids, amounts); None if inactive.

    frequency * count + presence * (count > 0), the coefficients clamped to [-2, 2] (the OpenAI
    formula), plus the overlay, which is not clamped. An id may occur twice: amounts add up.
    """
    presence = min(max(float(presence_penalty), PENALTY_MIN), PENALTY_MAX)
    frequency = min(max(float(frequency_penalty), PENALTY_MIN), PENALTY_MAX)
    ids, amounts = [], []
    if token_counts and (presence != 0.0 or frequency != 0.0):
        ids.append(_checked_ids(token_counts, vocab_size, "token_counts"))
        counts = np.fromiter(token_counts.values(), dtype=np.float64)
        amounts.append(frequency * counts + presence * (counts > 0))
    if penalty_overlay:
        ids.append(_checked_ids(penalty_overlay, vocab_size, "penalty_overlay"))
        amounts.append(np.fromiter(penalty_overlay.values(), dtype=np.float64))
    if not ids:
        return None
    return np.concatenate(ids), np.concatenate(amounts)


def apply_penalties(
    logits: ArrayLike,
    token_counts: Mapping[int, int] | None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_overlay: Mapping[int, float] | None = None,
) -> ArrayLike:
    """Logits less presence, frequency and overlay amounts (see ``penalty_amounts``).

    logits: (vocab,). token_counts: output token id -> times emitted. penalty_overlay: token id
    -> amount subtracted as it is. Inactive, it returns ``logits`` itself, else a float64 copy.
    Raises ``ValueError`` for an id outside the vocabulary.
    """
    size = len(logits)  # type: ignore[arg-type]
    found = penalty_amounts(
        token_counts, presence_penalty, frequency_penalty, penalty_overlay, size
    )
    if found is None:
        return logits
    out = np.array(logits, dtype=np.float64)
    np.subtract.at(out, *found)
    return out


def repeated_ids(
    config: SamplerConfig,
    token_counts: Mapping[int, int] | None,
    prompt_ids: Iterable[int] | None,
    vocab_size: int,
) -> Ids | None:
    """The ids the repetition penalty divides: in prompt or output; None if it is off or empty."""
    if config.repetition_penalty == 1.0:
        return None
    seen = {int(t) for t in prompt_ids} if prompt_ids is not None else set()
    seen.update(token for token, count in (token_counts or {}).items() if count > 0)
    return _checked_ids(sorted(seen), vocab_size, "prompt_ids or token_counts") if seen else None


def bias_amounts(config: SamplerConfig, vocab_size: int) -> tuple[Ids, Floats] | None:
    """``logit_bias`` as (ids, amounts); None if there is none."""
    if not config.logit_bias:
        return None
    ids = _checked_ids(config.logit_bias, vocab_size, "logit_bias")
    return ids, np.fromiter(config.logit_bias.values(), dtype=np.float64)


def processed_logits(
    logits: ArrayLike,
    config: SamplerConfig,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
    prompt_ids: Iterable[int] | None = None,
) -> Floats:
    """Steps 2 and 3 of the law: bias, repetition penalty (Keskar et al. 2019, arXiv 1909.05858:
    a positive logit is divided, another multiplied), presence and frequency penalties.

    logits: (vocab,). Returns (vocab,) float64; neutral parameters change nothing.
    """
    row = vector(logits, "logits")
    bias = bias_amounts(config, row.size)
    repeated = repeated_ids(config, token_counts, prompt_ids, row.size)
    if bias is not None or repeated is not None:
        row = row.copy()
    if bias is not None:
        row[bias[0]] += bias[1]
    if repeated is not None:
        seen, penalty = row[repeated], config.repetition_penalty
        row[repeated] = np.where(seen > 0, seen / penalty, seen * penalty)
    return apply_penalties(  # type: ignore[return-value]
        row, token_counts, config.presence_penalty, config.frequency_penalty, penalty_overlay
    )
