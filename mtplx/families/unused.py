"""Which stored tensors mlx-lm's class of a trunk throws away."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

Weights = dict[str, mx.array]

# What a pattern of names tells of the reason, the first that fits.
_REASONS = (
    (
        r"visual|vision|image|multi_modal|mm_projector",
        "vision, which mlx-lm's text model leaves out",
    ),
    (r"audio|speech|talker|token2wav", "audio, which mlx-lm's text model leaves out"),
    (r"inv_freq|rotary", "rotary frequencies, which are computed anew"),
    (r"mtp|nextn|eh_proj", "of an MTP head that mtplx knows nothing of"),
    (r"lm_head", "a copy of the embedding"),
    (r"scale|zero_point", "a scale of a stored format"),
)


def reason_of(pattern: str, layers: int) -> str:
    """Why a tensor is thrown away, as far as its name tells.  layers: how many the trunk has."""
    for words, reason in _REASONS:
        if re.search(words, pattern):
            return reason
    found = re.search(r"layers\.(\d+)\.", pattern)
    if found and int(found[1]) >= layers:
        return f"of a layer beyond the trunk's {layers}"
    return "mlx-lm's class of this type has no use for it"


def pattern_of(name: str, layers: int = 1 << 31) -> str:
    """A stored name with * for its numbers; the number of a layer from ``layers`` on stays."""
    found = re.search(r"layers\.(\d+)\.", name)
    end = found.end() if found and int(found[1]) >= layers else 0
    return name[:end] + re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name[end:])


def unused(
    sanitize: Callable[[Weights], Mapping[str, Any]], weights: Weights, layers: int
) -> dict[str, list[str]]:
    """The stored tensors without which ``sanitize`` makes the same, by the pattern of their names.

    Only names, shapes and types are compared; no tensor is read.  layers: how many the trunk has;
    a pattern keeps the numbers of those beyond.
    """
    made = sanitize(dict(weights))
    whole, kept = _forms(made), {id(value) for value in made.values()}
    candidates: dict[str, list[str]] = {}
    for name, value in weights.items():
        # What comes out as it went in is used, whatever it is called now.
        if name not in made and id(value) not in kept:
            candidates.setdefault(pattern_of(name, layers), []).append(name)

    def find(patterns: list[str]) -> list[str]:
        left_out = {name for each in patterns for name in candidates[each]}
        try:
            rest = {name: value for name, value in weights.items() if name not in left_out}
            same = _forms(sanitize(rest)) == whole
        except Exception:  # it looked for one of them, in whatever way
            same = False
        if same or len(patterns) < 2:
            return patterns if same else []
        middle = len(patterns) // 2
        return find(patterns[:middle]) + find(patterns[middle:])

    found = find(sorted(candidates)) if candidates else []
    return {each: candidates[each] for each in found}


def _forms(made: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in made.items()}
