"""The cases that are enumerated: laws with zeros, equal, disjoint, of every processor, with ends.

The random ones are from seeds of their own. ``BLOCKS`` are played with ``verify`` and ``Draws``
(``enumeration``), ``REQUESTS`` with the whole engine (``engine_play``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..distribution import Distribution, SparseDistribution
from ..sampler_config import SamplerConfig
from ..sampling import distribution_from_logits
from .enumeration import Case, Tokens

LawOf = Callable[[Tokens], Distribution]
DepthOf = Callable[[Tokens, Tokens], int]


def markov(
    vocab: int, seed: int, zeros: float = 0.0, order: int = 1, sparse: bool = False
) -> LawOf:
    """A random law that depends on the last ``order`` tokens; some probabilities are 0."""
    generator = np.random.default_rng(seed)
    table: dict[Tokens, Distribution] = {}
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


def constant(*probs: float) -> LawOf:
    """The same law everywhere."""
    row = np.array(probs)
    return lambda history: row


def depth(number: int) -> DepthOf:
    """The same depth everywhere."""
    return lambda history, drafts: number


def deep_then_shallow(history: Tokens, drafts: Tokens) -> int:
    """Three drafts in the first round, one in the next: keeps the play small."""
    return 1 if history else 3


def depth_of_history(history: Tokens, drafts: Tokens) -> int:
    """Depth 0 (plain decoding) to 2, by history and by the drafts already placed."""
    wanted = (sum(history) + len(history)) % 3
    return min(wanted, len(drafts)) if drafts and drafts[-1] == 1 else wanted


def penalised(vocab: int, seed: int, **parameters: Any) -> LawOf:
    """P after processors: what has been emitted, drafts included, changes the next law."""
    logits = np.random.default_rng(seed).normal(0, 1, (vocab + 1, vocab))
    config = SamplerConfig(**{"temperature": 0.8, "top_p": 1.0, "top_k": 0, **parameters})

    @cache
    def law(history: Tokens) -> Distribution:
        row = logits[history[-1] if history else vocab]
        return distribution_from_logits(
            row, config, token_counts=Counter(history), prompt_ids=[0, 0]
        )

    return law


def one_hot(vocab: int, choose: Callable[[Tokens], int]) -> LawOf:
    """All mass on one token."""
    return lambda history: SparseDistribution.one_hot(choose(history), vocab)


BLOCKS = {
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
