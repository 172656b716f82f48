"""The joint law of whole blocks and the rounds after them, by enumeration.

A round is played with the shipped functions: ``Draws`` for the drafts, ``verify`` for the verdict.
Only the noise is replaced, by one that forks the play over every outcome (``forking``).

The law of what is emitted, played on by p itself up to a common length, must be the product of p.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from forking import Noise, play_all

from mtplx.rng import Draws
from mtplx.sampling import (
    SamplerConfig,
    SparseDistribution,
    distribution_from_logits,
)
from mtplx.verify import RULES, verify

EXACT = 1e-12
WRONG = 1e-3


# --- rounds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Laws of target and drafter, both functions of the history, and the shape of the play."""

    p: Callable[[tuple], object]
    q: Callable[[tuple], object]
    depth: Callable[[tuple, tuple], int]  # history, drafts placed so far -> how deep at most
    vocab: int
    eos: tuple[int, ...] = ()
    rounds: int = 2
    longest: int = 6
    stop_drafting_at_eos: bool = True


def round_of(rule: str, case: Case, history: tuple, start: int, draws: Draws, noise: Noise):
    """One round; the tokens it emits."""
    drafts: tuple[int, ...] = ()
    q_rows = []
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
    verdict = verify(rule, p_rows, q_rows, drafts, draws, start=start, eos_ids=case.eos)
    emitted = drafts[: verdict.accepted]
    if verdict.next_token is None:
        assert emitted[-1] in case.eos
    else:
        emitted = (*emitted, verdict.next_token)
    assert len(emitted) >= 1
    assert not any(token in case.eos for token in emitted[:-1])
    return emitted


def probability(law, token: int) -> float:
    return law.probability(token) if isinstance(law, SparseDistribution) else float(law[token])


def token_flips(p_rows, q_rows, drafts):
    return [
        probability(p, x) / probability(q, x)
        for p, q, x in zip(p_rows, q_rows, drafts, strict=False)
    ]


def block_flips(p_rows, q_rows, drafts):
    """h_K..h_1, written out on dense rows: the coins of the longest part come first."""
    kept, flips = [1.0], []
    for p, q, x in zip(p_rows, q_rows, drafts, strict=False):
        kept.append(min(1.0, kept[-1] * probability(p, x) / probability(q, x)))
    for i in range(1, len(drafts)):
        above = np.maximum(kept[i] * dense(p_rows[i]) - dense(q_rows[i]), 0).sum()
        below = above + 1 - kept[i]
        flips.append(1.0 if below == 0 else above / below)
    return [kept[-1], *reversed(flips)]


# Where the coins of a rule flip, in the order in which it tosses them.
FLIPS = {"token": token_flips, "block": block_flips, "coupled": lambda *_: []}


def law_of_play(rule: str, case: Case, monkeypatch) -> dict[tuple, float]:
    """Law of what ``case.rounds`` rounds emit."""
    start = 5

    def play(noise: Noise) -> tuple:
        draws, history = Draws(1, 2), ()
        for _ in range(case.rounds):
            if any(token in case.eos for token in history):
                break
            history += round_of(rule, case, history, start + len(history), draws, noise)
        return history

    law: dict[tuple, float] = defaultdict(float)
    for weight, history in play_all(play, monkeypatch):
        law[history] += weight
    return law


def dense(law) -> np.ndarray:
    return law.to_dense() if isinstance(law, SparseDistribution) else law


def product_law(case: Case, prefix: tuple, length: int) -> dict[tuple, float]:
    """Law of plain decoding up to ``length`` tokens or EOS, after ``prefix``."""
    done: dict[tuple, float] = {}
    open_: dict[tuple, float] = {prefix[:length]: 1.0}
    while open_:
        history, weight = open_.popitem()
        if len(history) == length or any(token in case.eos for token in history):
            done[history] = weight
            continue
        for token, chance in enumerate(dense(case.p(history))):
            if chance > 0:
                open_[(*history, token)] = weight * chance
    return done


def total_variation(rule: str, case: Case, monkeypatch) -> float:
    played: dict[tuple, float] = defaultdict(float)
    law = law_of_play(rule, case, monkeypatch)
    assert abs(sum(law.values()) - 1.0) < EXACT
    for history, weight in law.items():
        for whole, chance in product_law(case, history, case.longest).items():
            played[whole] += weight * chance
    exact = product_law(case, (), case.longest)
    return sum(abs(played[h] - exact.get(h, 0.0)) for h in played.keys() | exact.keys()) / 2


# --- cases ------------------------------------------------------------------------------------


def markov(vocab: int, seed: int, zeros: float = 0.0, order: int = 1, sparse: bool = False):
    """A random law that depends on the last ``order`` tokens; some probabilities are 0."""
    generator = np.random.default_rng(seed)
    table = {}
    for length in range(order + 1):
        for context in itertools.product(range(vocab), repeat=length):
            weights = generator.dirichlet(np.full(vocab, 0.8))
            weights[generator.random(vocab) < zeros] = 0.0
            if not weights.sum():
                weights[generator.integers(vocab)] = 1.0
            row = weights / weights.sum()
            ids = np.flatnonzero(row)
            table[context] = SparseDistribution(ids, row[ids], vocab) if sparse else row
    return lambda history: table[history[len(history) - min(order, len(history)) :]]


def constant(*probs: float):
    row = np.array(probs)
    return lambda history: row


def depth(number: int):
    return lambda history, drafts: number


def deep_then_shallow(history, drafts):
    """Three drafts in the first round, one in the next: keeps the play small."""
    return 1 if history else 3


def depth_of_history(history, drafts):
    """Depth 0 (plain decoding) to 2, by history and by the drafts already placed."""
    wanted = (sum(history) + len(history)) % 3
    return min(wanted, len(drafts)) if drafts and drafts[-1] == 1 else wanted


def penalised(vocab: int, seed: int, **parameters):
    """p after processors: what has been emitted, drafts included, changes the next law."""
    logits = np.random.default_rng(seed).normal(0, 1, (vocab + 1, vocab))
    config = SamplerConfig(**{"temperature": 0.8, "top_p": 1.0, "top_k": 0, **parameters})

    @cache
    def law(history):
        row = logits[history[-1] if history else vocab]
        return distribution_from_logits(
            row, config, token_counts=Counter(history), prompt_ids=[0, 0]
        )

    return law


def one_hot(vocab: int, choose: Callable[[tuple], int]):
    return lambda history: SparseDistribution.one_hot(choose(history), vocab)


CASES = {
    "two tokens, K = 3": Case(markov(2, 1), markov(2, 2), depth(3), 2, longest=8),
    "three rounds": Case(markov(2, 3, order=2), markov(2, 4), depth(2), 2, rounds=3),
    "three tokens, K = 2": Case(markov(3, 5, order=2), markov(3, 6), depth(2), 3),
    "three tokens, K = 3": Case(markov(3, 7), markov(3, 8), deep_then_shallow, 3),
    "zeros": Case(markov(3, 9, 0.4, 2), markov(3, 10, 0.4), depth(2), 3),
    "zeros, sparse": Case(
        markov(3, 11, 0.4, 2, sparse=True), markov(3, 12, 0.4, sparse=True), depth(2), 3
    ),
    "sparse and dense": Case(markov(3, 13, 0.3, sparse=True), markov(3, 14, 0.3), depth(2), 3),
    "disjoint supports": Case(constant(0.4, 0.6, 0.0), constant(0.0, 0.0, 1.0), depth(2), 3),
    "overlap in one token": Case(constant(0.4, 0.6, 0.0), constant(0.0, 0.5, 0.5), depth(3), 3),
    "p = q": Case(markov(3, 15), markov(3, 15), depth(2), 3),
    "uniform": Case(constant(0.5, 0.5), constant(0.5, 0.5), depth(3), 2),
    "one-hot drafts": Case(
        markov(3, 16, order=2), one_hot(3, lambda h: (len(h) + sum(h)) % 3), depth(3), 3
    ),
    "one-hot target": Case(
        one_hot(3, lambda h: (len(h) * 2 + sum(h)) % 3), markov(3, 17), depth(2), 3
    ),
    "both one-hot": Case(one_hot(3, lambda h: len(h) % 3), one_hot(3, lambda h: 1), depth(3), 3),
    "EOS ends the block": Case(markov(3, 18), markov(3, 19), depth(2), 3, eos=(2,)),
    "drafts go on past EOS": Case(
        markov(3, 20), markov(3, 21), deep_then_shallow, 3, eos=(1,), stop_drafting_at_eos=False
    ),
    "EOS, three rounds": Case(markov(2, 42), markov(2, 43), depth(2), 2, eos=(0,), rounds=3),
    "two EOS": Case(markov(3, 22), markov(3, 23), depth(2), 3, eos=(0, 2)),
    "depth by history": Case(markov(3, 24), markov(3, 25), depth_of_history, 3, rounds=3),
    "no drafts": Case(markov(3, 26), markov(3, 27), depth(0), 3, rounds=4, longest=4),
    "presence penalty": Case(
        penalised(3, 28, presence_penalty=1.5), penalised(3, 29), depth(2), 3
    ),
    "frequency penalty, bias": Case(
        penalised(3, 30, frequency_penalty=-0.7, logit_bias={1: 0.5}),
        penalised(3, 31, frequency_penalty=-0.7),
        depth(2),
        3,
    ),
    "repetition penalty": Case(
        penalised(3, 32, repetition_penalty=1.8), markov(3, 33), depth(2), 3
    ),
    "filters": Case(
        penalised(3, 34, top_p=0.8, presence_penalty=1.0), penalised(3, 35, top_k=2), depth(2), 3
    ),
    "greedy": Case(
        penalised(3, 36, temperature=0.0, presence_penalty=1.0),
        penalised(3, 37, temperature=0.0),
        depth(3),
        3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_is_the_product_of_p(rule, case, monkeypatch):
    if rule not in FLIPS:
        pytest.fail(f"say in FLIPS where the coins of rule {rule!r} flip")
    assert total_variation(rule, case, monkeypatch) <= EXACT


WIDE = {
    "four tokens, K = 4": Case(
        markov(4, 50, 0.3, 2), markov(4, 51, 0.2), depth(4), 4, rounds=1, longest=5
    ),
    "four tokens, K = 3, EOS": Case(
        markov(4, 52), markov(4, 53), depth(3), 4, eos=(3,), rounds=1, longest=4
    ),
    "four tokens, K by history": Case(
        markov(4, 54, 0.2), markov(4, 55), lambda h, d: 4 if sum(d) < 4 else 0, 4, rounds=1,
        longest=5,
    ),
    "four tokens, processors": Case(
        penalised(4, 56, repetition_penalty=1.5, min_p=0.1, logit_bias={2: -np.inf}),
        penalised(4, 57, presence_penalty=-0.5, logit_bias={2: -np.inf}), depth(3), 4, rounds=1,
        longest=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_of_one_block_of_four_tokens(rule, case, monkeypatch):
    assert total_variation(rule, case, monkeypatch) <= EXACT


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_of_random_pairs(rule, seed, monkeypatch):
    p = markov(3, 100 + seed, zeros=0.15 * (seed % 3), order=2, sparse=bool(seed % 2))
    case = Case(p, markov(3, 200 + seed, zeros=0.3 * (seed % 2)), depth(2), 3)
    assert total_variation(rule, case, monkeypatch) <= EXACT


def test_the_coupled_rule_emits_what_plain_decoding_emits():
    """Path by path, with the real noise: drafts of any quality change nothing."""
    for seed in range(60):
        case = replace(CASES["depth by history"], p=markov(3, seed, 0.2, 2))
        draws, text, plain = Draws(seed, seed), (), ()
        while len(text) < 12:
            text += round_of("coupled", case, text, len(text), draws, Noise())
        while len(plain) < len(text):
            plain += (Draws(seed).race(len(plain), case.p(plain)),)
        assert text == plain


def test_the_coupled_rule_keeps_every_draft_of_p_itself():
    law = markov(3, 1)
    for seed in range(40):
        case = Case(law, law, depth(3), 3)
        assert len(round_of("coupled", case, (), 0, Draws(seed), Noise())) == 4
