"""The joint law of whole blocks and the rounds after them, by enumeration.

A round is played with the shipped functions: ``Draws`` for the drafts, ``verify`` for the verdict.
Only the noise is replaced, by one that forks the play over every outcome (``forking``). The law of
what is emitted, played on by p itself up to a common length, must be the product of p.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import verify as rules
from ..distribution import Distribution, as_dense
from ..rng import Draws
from .forking import ImpossibleError, Noise, play_all

# What rounding may leave of a total variation of 0.
EXACT = 1e-12
Tokens = tuple[int, ...]
Law = dict[Tokens, float]


@dataclass(frozen=True)
class Case:
    """Laws of target and drafter, both functions of the history, and the shape of the play.

    depth: (history, drafts placed so far) -> how many drafts at most.  longest: tokens of the
    texts whose laws are compared; no play may emit more.
    """

    p: Callable[[Tokens], Distribution]
    q: Callable[[Tokens], Distribution]
    depth: Callable[[Tokens, Tokens], int]
    vocab: int
    eos: Tokens = ()
    rounds: int = 2
    longest: int = 6
    stop_drafting_at_eos: bool = True


def round_of(
    rule: str, case: Case, history: Tokens, start: int, draws: Draws, noise: Noise
) -> Tokens:
    """One round; the tokens it emits."""
    drafts: Tokens = ()
    q_rows: list[Distribution] = []
    while len(drafts) < case.depth(history, drafts):
        q = case.q(history + drafts)
        if rule == "coupled":
            token = draws.race(start + len(drafts), q)
        else:
            token = draws.draft(start, len(drafts), q)
        drafts, q_rows = (*drafts, token), [*q_rows, q]
        if token in case.eos and case.stop_drafting_at_eos:
            break
    p_rows = [case.p(history + drafts[:i]) for i in range(len(drafts) + 1)]
    length = next((i for i, token in enumerate(drafts, 1) if token in case.eos), len(drafts))
    noise.flips = FLIPS[rule](p_rows, q_rows, drafts[:length])
    verdict = rules.verify(rule, p_rows, q_rows, drafts, draws, start=start, eos_ids=case.eos)
    emitted = drafts[: verdict.accepted]
    if verdict.next_token is not None:
        emitted = (*emitted, verdict.next_token)
    elif not emitted or emitted[-1] not in case.eos:
        raise ImpossibleError("a round ends without a token that follows, and without an end")
    if any(token in case.eos for token in emitted[:-1]):
        raise ImpossibleError("tokens follow an end of sequence")
    return emitted


# --- where coins flip ---------------------------------------------------------------------------
# Written out anew, on dense rows: where a rule flips elsewhere, its law comes out wrong.

Flips = Callable[[Sequence[Distribution], Sequence[Distribution], Sequence[int]], list[float]]


def _token_flips(
    p_rows: Sequence[Distribution], q_rows: Sequence[Distribution], drafts: Sequence[int]
) -> list[float]:
    rows = zip(p_rows, q_rows, drafts, strict=False)
    return [float(as_dense(p)[x] / as_dense(q)[x]) for p, q, x in rows]


def _block_flips(
    p_rows: Sequence[Distribution], q_rows: Sequence[Distribution], drafts: Sequence[int]
) -> list[float]:
    """h_K..h_1: the coins of the longest part come first."""
    kept, flips = [1.0], []
    for p, q, x in zip(p_rows, q_rows, drafts, strict=False):
        kept.append(min(1.0, kept[-1] * float(as_dense(p)[x] / as_dense(q)[x])))
    for i in range(1, len(drafts)):
        above = float(np.maximum(kept[i] * as_dense(p_rows[i]) - as_dense(q_rows[i]), 0).sum())
        below = above + 1 - kept[i]
        flips.append(1.0 if below == 0 else above / below)
    return [kept[-1], *reversed(flips)]


# Where the coins of a rule flip, in the order in which it tosses them.
FLIPS: dict[str, Flips] = {
    "token": _token_flips,
    "block": _block_flips,
    "coupled": lambda *_: [],
}

# --- laws -----------------------------------------------------------------------------------------


def law_of_play(rule: str, case: Case) -> Law:
    """The law of what ``case.rounds`` rounds emit."""

    def play(noise: Noise) -> Tokens:
        draws, start = Draws(1, 2), 5
        history: Tokens = ()
        for _ in range(case.rounds):
            if any(token in case.eos for token in history):
                break
            history += round_of(rule, case, history, start + len(history), draws, noise)
        return history

    law: Law = defaultdict(float)
    for weight, history in play_all(play):
        law[history] += weight
    return law


def product_law(case: Case, prefix: Tokens, length: int) -> Law:
    """The law of plain decoding up to ``length`` tokens or an end, after ``prefix``."""
    done: Law = {}
    open_: Law = {prefix[:length]: 1.0}
    while open_:
        history, weight = open_.popitem()
        if len(history) == length or any(token in case.eos for token in history):
            done[history] = weight
            continue
        for token, chance in enumerate(as_dense(case.p(history)).tolist()):
            if chance > 0:
                open_[(*history, token)] = weight * chance
    return done


def distance(one: Mapping[Tokens, float], other: Mapping[Tokens, float]) -> float:
    """Total variation of two laws of texts; 1 if one of them does not sum to 1."""
    if any(abs(sum(law.values()) - 1.0) > EXACT for law in (one, other)):
        return 1.0
    return sum(abs(one.get(h, 0.0) - other.get(h, 0.0)) for h in one.keys() | other.keys()) / 2


def total_variation(rule: str, case: Case) -> float:
    """Between what is emitted and the product of p; 1 if something impossible is."""
    try:
        law = law_of_play(rule, case)
    except ImpossibleError:
        return 1.0
    played: Law = defaultdict(float)
    for history, weight in law.items():
        for whole, chance in product_law(case, history, case.longest).items():
            played[whole] += weight * chance
    return distance(played, product_law(case, (), case.longest))
