"""What the target said of an emitted token."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from .distribution import Distribution, _probability, support
from .sampling import deterministic_top_k_order


@dataclass(frozen=True)
class TokenLogprob:
    """log p of an emitted token; p is the processed law of its position, drafted or not.

    top: the likeliest tokens as (id, log p), most likely first, ties by id; those with p > 0.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(law: Distribution, token_id: int, top: int) -> TokenLogprob:
    """The record of one token; ``top``: how many of the likeliest to list."""
    listed: tuple[tuple[int, float], ...] = ()
    if top:
        ids, probs = support(law)
        order = deterministic_top_k_order(probs, top)
        listed = tuple((int(ids[i]), log(probs[i])) for i in order)
    return TokenLogprob(token_id, log(_probability(law, token_id)), listed)
