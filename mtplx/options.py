"""How to generate: every option with its range and default. Imports without MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args

from .errors import RequestError
from .sampler_config import SamplerConfig

DraftSource = Literal["auto", "mtp", "ngram", "none"]
RuleName = Literal["token", "coupled"]
WeightsForm = Literal["auto", "packed", "float32"]
Depth = int | Literal["auto"]
MAX_DEPTH = 64


@dataclass(frozen=True)
class Options:
    """How to generate; ``ValueError`` (``RequestError``) names a field that is wrong.

    sampling: the law.  max_tokens: at most so many tokens, >= 1; the end-of-sequence token counts.
    seed: in [0, 2^64); drawn and reported if None.  stop: strings that end the output and are
    not shown.  draft: where drafts come from; "auto" is the model's own MTP head if it has one,
    or n-grams in the rounds in which they promise more, or n-grams alone.  depth: most tokens
    drafted a round, from the head if there is one where draft is "auto"; "auto" is as many as pay.
    verify: "token" or "coupled"; None is "coupled" (the same text with and without drafts) where a
    seed is given, else "token".  chat: put a plain string through the model's chat template.
    """

    sampling: SamplerConfig = field(default_factory=SamplerConfig)
    max_tokens: int = 256
    seed: int | None = None
    stop: Sequence[str] = ()
    draft: DraftSource = "auto"
    depth: Depth = "auto"
    verify: RuleName | None = None
    chat: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.sampling, SamplerConfig):
            raise RequestError(f"sampling must be a SamplerConfig, not {self.sampling!r}")
        limits = {"max_tokens": (1, None), "seed": (0, 2**64 - 1), "depth": (0, MAX_DEPTH)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not (value is None and name == "seed") and not (value == "auto" and name == "depth"):
                object.__setattr__(self, name, _checked_integer(name, value, low, high))
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        _check_choice("draft", self.draft, get_args(DraftSource))
        if self.verify is not None:
            _check_choice("verify", self.verify, get_args(RuleName))
        if not isinstance(self.chat, bool):
            raise RequestError(f"chat must be True or False, not {self.chat!r}")


def _checked_integer(name: str, value: Any, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        kind = "'auto' or an integer" if name == "depth" else "an integer"
        raise RequestError(f"{name} must be {kind}, not {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{name} must be {limit}, not {value}")
    return number


def _checked_stops(stop: Any) -> tuple[str, ...]:
    try:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        stops = (None,)
    for item in stops:
        if not isinstance(item, str) or not item:
            raise RequestError(f"stop must be non-empty strings, not {item!r}")
        if not item.isprintable() and any("\ud800" <= c <= "\udfff" for c in item):
            raise RequestError(f"stop must be valid Unicode, not {item!r}")
    return stops


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise RequestError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
