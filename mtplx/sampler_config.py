"""Sampling parameters: which exist, their ranges and their neutral values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from numbers import Integral, Real
from typing import Any

import numpy as np

# The OpenAI range; coefficients outside it are clamped when they are applied.
PENALTY_MIN, PENALTY_MAX = -2.0, 2.0


_REALS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, not {value!r}")
    number = _as_float(value)
    if not isfinite(number):
        raise ValueError(f"{name} must be finite, not {value!r}")
    return number


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _count(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be >= 0 (0 is off), not {value!r}")
    return int(value)


def _checked_bias(bias: Any) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}")
    checked = {}
    for token, amount in bias.items():
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise ValueError(f"logit_bias has {token!r}, which is not a token id")
        if isinstance(amount, bool) or not isinstance(amount, Real) or isnan(_as_float(amount)):
            raise ValueError(f"logit_bias[{token}] must be a number, not {amount!r}")
        if _as_float(amount) == float("inf"):
            raise ValueError(f"logit_bias[{token}] must not be +inf (-inf bans a token)")
        checked[int(token)] = _as_float(amount)
    return checked


def _checked_ids(ids: Any) -> tuple[int, ...]:
    try:
        listed = tuple(ids)
    except TypeError:
        raise ValueError(f"banned_ids must be token ids, not {ids!r}") from None
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise ValueError(f"banned_ids has {token!r}, which is not a token id")
    return tuple(int(token) for token in listed)


@dataclass(frozen=True)
class SamplerConfig:
    """Sampling parameters, checked when built; a bad field raises ``ValueError`` naming it.

    temperature: any finite number; <= 0 is greedy.
    top_p: in (0, 1]; 1 is off.  top_k: an integer >= 0; 0 is off.  min_p: in [0, 1]; 0 is off.
    presence_penalty, frequency_penalty: finite, clamped to [-2, 2] when applied; 0 is off.
    repetition_penalty: > 0; 1 is off.
    logit_bias: token id -> amount added to its logit; -inf bans the token.
    banned_ids: token ids that are banned: each becomes a ``logit_bias`` of -inf.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    banned_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Check every field and store it as a plain float, int or dict of its own."""
        object.__setattr__(self, "top_k", _count("top_k", self.top_k))
        for name in _REALS:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p!r}")
        if self.repetition_penalty <= 0.0:
            raise ValueError(f"repetition_penalty must be > 0, not {self.repetition_penalty!r}")
        object.__setattr__(self, "banned_ids", _checked_ids(self.banned_ids))
        if self.logit_bias is not None or self.banned_ids:
            bias = _checked_bias({} if self.logit_bias is None else self.logit_bias)
            bias = {**bias, **dict.fromkeys(self.banned_ids, float("-inf"))}
            object.__setattr__(self, "logit_bias", bias)
