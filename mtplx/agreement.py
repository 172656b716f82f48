"""Whether two outputs under one seed agree, and if not, how close the call was.

With equal logits the coupled rule gives the text of plain decoding, token for token. A verify
forward over several rows may sum in another order than one over a single row; then a first
difference must be a near-tie: two tokens that a logit change of the margin below would swap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .distribution import SparseDistribution
from .families import family_of
from .load import Bundle
from .rng import Domain, derive_key, exponentials
from .sampler_config import SamplerConfig
from .sequence import History
from .state import State

# Logits of forwards over one and over several rows have been seen up to 1e-4 apart.
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs differ.

    position: index in the output.  tokens: the two ids, None where an output has ended.
    margin: how much the logit of one must change for the other to win, in logits of the law with
    penalties; None where one of them is outside the support, by a filter's threshold, or missing.
    """

    position: int
    tokens: tuple[int | None, int | None]
    margin: float | None

    @property
    def near_tie(self) -> bool:
        """Whether another order of summation may be all there is to it."""
        return self.margin is not None and self.margin < NEAR_TIE

    def __str__(self) -> str:
        """One line for people."""
        place = (
            f"first difference at token {self.position + 1}: {self.tokens[0]} / {self.tokens[1]}"
        )
        if self.margin is None:
            return f"{place}, one of them outside the support"
        kind = "a near-tie" if self.near_tie else "NOT a near-tie: please report it"
        return f"{place}, {kind}, logit margin {self.margin:.2g}"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, None if they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def difference(
    bundle: Bundle,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    *,
    sampling: SamplerConfig,
    seed: int,
) -> Difference | None:
    """The first difference of two outputs of the coupled rule, with its margin; None if equal."""
    at = first_difference(one, other)
    if at is None:
        return None
    if at >= min(len(one), len(other)):
        ends = [output[at] if at < len(output) else None for output in (one, other)]
        return Difference(at, (ends[0], ends[1]), None)
    tokens = (one[at], other[at])
    common = [*prompt, *one[:at]]
    state = State(family_of(bundle.trunk))
    for _ in state.prefill(common[:-1]):
        pass
    _, logits = state.forward(common[-1:])
    # Greedy: what counts is the distance of the two logits, whatever the filters.
    greedy = replace(sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    history = History(sampling if sampling.temperature > 0 else greedy, prompt)
    history.counts.update(one[:at])
    law = history.law_after(logits[0], [])
    if not all(law.probability(token) > 0 for token in tokens):
        return Difference(at, tokens, None)
    return Difference(at, tokens, _margin(law, tokens, sampling, seed, len(common)))


def _margin(
    law: SparseDistribution,
    tokens: tuple[int, int],
    sampling: SamplerConfig,
    seed: int,
    position: int,
) -> float:
    """|difference of T log p - T log E|: the gap of the race, in units of logits."""
    logs = np.log([law.probability(t) for t in tokens])
    if sampling.temperature <= 0:
        return float(abs(logs[0] - logs[1]))
    noise = exponentials(derive_key(Domain.RACE, seed), position, np.array(tokens))
    scores = logs - np.log(noise)
    return float(abs(scores[0] - scores[1]) * sampling.temperature)
