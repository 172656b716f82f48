"""How to generate: every option with its range and default. Imports without MLX."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args

from .errors import RequestError
from .sampler_config import SamplerConfig

DraftSource = Literal["auto", "mtp", "model", "ngram", "none"]
RuleName = Literal["token", "block", "coupled"]
WeightsForm = Literal["auto", "packed", "float32"]
Depth = int | Literal["auto"]
MAX_DEPTH = 64
_LIMITS: dict[str, tuple[int, int | None]] = {
    "max_tokens": (1, None),
    "seed": (0, 2**64 - 1),
    "depth": (0, MAX_DEPTH),
    "min_tokens": (0, None),
    "top_logprobs": (0, None),
}


@dataclass(frozen=True)
class Options:
    """How to generate; ``ValueError`` (``RequestError``) names a field that is wrong.

    sampling: the law.  max_tokens: at most so many tokens, >= 1; the end-of-sequence token counts.
    seed: in [0, 2^64); drawn and reported if None.  stop: strings that end the output and are
    not shown.  draft: where drafts come from; "auto" is ``draft_model`` or else the model's own MTP
    head if there is one, or n-grams in the rounds in which they promise more, or n-grams alone.
    depth: most tokens drafted a round, not from n-grams where draft is "auto" and there is another
    source; "auto" is as many as pay.
    verify: "token", "block" or "coupled"; None is "coupled" (the same text with and without drafts)
    where a seed is given, else "block".  chat: put a plain string through the chat template.
    min_tokens: no end of sequence before so many tokens.  json_schema (a mapping, or JSON), regex:
    the text must match all of it; one of them at most.  logprobs: log p of every token, p the law
    it was drawn from.  top_logprobs: so many of the likeliest tokens beside it; needs logprobs.
    draft_model: a smaller model to draft with, as ``load`` gives it, whose vocabulary is the
    model's or shares half of its tokens; for draft "model" or "auto".
    """

    sampling: SamplerConfig = field(default_factory=SamplerConfig)
    max_tokens: int = 256
    seed: int | None = None
    stop: Sequence[str] = ()
    draft: DraftSource = "auto"
    depth: Depth = "auto"
    verify: RuleName | None = None
    chat: bool = True
    min_tokens: int = 0
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    draft_model: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.sampling, SamplerConfig):
            raise RequestError(f"sampling must be a SamplerConfig, not {self.sampling!r}")
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not (value is None and name == "seed") and not (value == "auto" and name == "depth"):
                object.__setattr__(self, name, _checked_integer(name, value, low, high))
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        _check_choice("draft", self.draft, get_args(DraftSource))
        if self.verify is not None:
            _check_choice("verify", self.verify, get_args(RuleName))
        for name in ("chat", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._check_together()

    def _check_together(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs")
        if self.draft == "model" and self.draft_model is None:
            raise RequestError("draft 'model' needs a draft_model")
        if self.draft_model is not None and self.draft not in ("model", "auto"):
            raise RequestError(f"a draft_model is not for draft {self.draft!r}")
        if self.json_schema is not None and self.regex is not None:
            raise RequestError("json_schema or regex, not both")
        if not isinstance(self.regex, str | None):
            raise RequestError(f"regex must be a string, not {self.regex!r}")
        if not isinstance(self.json_schema, str | None):
            object.__setattr__(self, "json_schema", _json(self.json_schema))


def _json(schema: Any) -> str:
    try:
        return json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
    except (TypeError, ValueError) as e:
        raise RequestError(f"json_schema cannot be written as JSON: {e}") from None


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
