"""The joint law of whole blocks and the rounds after them, by enumeration.

A round is played with the shipped functions: ``Draws`` for the drafts, ``verify`` for the verdict.
Only the noise is replaced, below ``Draws``: ``rng.race`` and ``rng.uniforms`` fork the play over
every outcome instead of computing one. Noise is known by its Threefry key and position, so draws
with equal keys are one random variable and draws with different keys are independent:

* races: the noise (E_1, E_2, E_3) of three tokens, divided by its sum, is uniform on a triangle.
  A race argmin E/p cuts it by lines through E_a p_v = E_v p_a, so what several races have told of
  one noise is a convex polygon, and the chance of the next winner a ratio of areas. Exact.
* coins: what comparisons have told of one uniform is an interval, cut where acceptance flips.

The law of what is emitted, played on by p itself up to a common length, must be the product of p.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

import mtplx.verify.token as token_rule
from mtplx import rng
from mtplx.rng import Domain, Draws, derive_key
from mtplx.sampling import (
    SamplerConfig,
    SparseDistribution,
    distribution_from_logits,
    residual_distribution,
)
from mtplx.verify import RULES, Verdict, verify

EXACT = 1e-12
WRONG = 1e-3
TRIANGLE = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
# Comparisons u q < p are played this near to where they flip, on either side.
NEAR = 1e-14


# --- noise that forks -------------------------------------------------------------------------


def area(polygon) -> float:
    if len(polygon) < 3:
        return 0.0
    (x0, y0, _), total = polygon[0], 0.0
    for (x1, y1, _), (x2, y2, _) in itertools.pairwise(polygon[1:]):
        total += (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)
    return abs(total) / 2


def clip(polygon, side: Callable) -> tuple:
    """The part of a convex polygon where the linear ``side`` is >= 0."""
    out = []
    values = [side(point) for point in polygon]
    for i, (point, value) in enumerate(zip(polygon, values, strict=True)):
        before, value_before = polygon[i - 1], values[i - 1]
        if (value >= 0) != (value_before >= 0):
            t = value_before / (value_before - value)
            out.append(tuple(a + t * (b - a) for a, b in zip(before, point, strict=True)))
        if value >= 0:
            out.append(point)
    return tuple(out)


@cache
def cut(polygon: tuple, ids: tuple, probs: tuple) -> list:
    """The winners of a race and the parts of ``polygon`` where they win: (share, (id, part))."""
    assert max(ids) < 3, "the triangle is of three tokens"
    if len(ids) == 1:
        return [(1.0, (ids[0], polygon))]
    outcomes = []
    for a, p in zip(ids, probs, strict=True):
        part = polygon
        for v, other in zip(ids, probs, strict=True):
            if v != a:
                part = clip(part, lambda e, v=v, p=p, o=other, a=a: e[v] * p - e[a] * o)
        outcomes.append((area(part) / area(polygon), (a, part)))
    total = sum(share for share, _ in outcomes)
    assert abs(total - 1.0) < 1e-9
    return [(share / total, o) for share, o in outcomes if share > 1e-14]


@dataclass
class Noise:
    """One path of the play: what is known of every random variable, and how likely it is."""

    script: list[int] = field(default_factory=list)
    weight: float = 1.0
    taken: int = 0
    known: dict = field(default_factory=dict)
    flips: list[float] = field(default_factory=list)

    def fork(self, outcomes: list) -> object:
        """Take the scripted outcome, the first one where the script ends."""
        outcomes = [o for o in outcomes if o[0] > 0.0]
        if self.taken == len(self.script):
            self.script.append(len(outcomes) - 1)
        weight, outcome = outcomes[self.script[self.taken]]
        self.taken += 1
        self.weight *= weight
        return outcome

    def race(self, key, position, law) -> int:
        ids, probs = rng.support(law)
        polygon = self.known.get((key, position), TRIANGLE)
        winner, part = self.fork(cut(polygon, tuple(ids.tolist()), tuple(probs.tolist())))
        self.known[key, position] = part
        return winner

    def uniforms(self, key, position, ids):
        """One uniform, beside the next announced flip: below it, or above."""
        assert ids.tolist() == [0]
        low, high = self.known.get((key, position), (0.0, 1.0))
        flip = min(max(self.flips.pop(0), low), high)
        halves = [
            ((flip - low) / (high - low), (low, flip)),
            ((high - flip) / (high - low), (flip, high)),
        ]
        interval = self.fork(halves)
        self.known[key, position] = interval
        if interval[1] == flip and flip > low:
            return np.array([min(flip * (1 - NEAR), 1 - 2.0**-53)])
        return np.array([max(flip * (1 + NEAR), 2.0**-53)])


def play_all(play: Callable[[Noise], object], monkeypatch):
    """(weight, result) of every path of ``play``."""
    script: list[int] | None = []
    while script is not None:
        noise = Noise(script=list(script))
        monkeypatch.setattr(rng, "race", noise.race)
        monkeypatch.setattr(rng, "uniforms", noise.uniforms)
        result = play(noise)
        yield noise.weight, result
        script = noise.script
        while script and script[-1] == 0:
            script.pop()
        script = [*script[:-1], script[-1] - 1] if script else None


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
    noise.flips = FLIPS[rule](p_rows, q_rows, drafts)
    verdict = verify(rule, p_rows, q_rows, drafts, draws, start=start, eos_ids=case.eos)
    emitted = drafts[: verdict.accepted]
    if verdict.next_token is None:
        assert emitted[-1] in case.eos
    else:
        emitted = (*emitted, verdict.next_token)
    assert len(emitted) >= 1
    if rule != "block":
        assert not any(token in case.eos for token in emitted[:-1])
    return emitted


def probability(law, token: int) -> float:
    return law.probability(token) if isinstance(law, SparseDistribution) else float(law[token])


def token_flips(p_rows, q_rows, drafts):
    return [
        probability(p, x) / probability(q, x)
        for p, q, x in zip(p_rows, q_rows, drafts, strict=False)
    ]


FLIPS = {"token": token_flips, "coupled": lambda *_: []}


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


# --- the enumerator itself --------------------------------------------------------------------


def joint_of_two_races(p, q) -> np.ndarray:
    """P(argmin E/q = a, argmin E/p = b): the closed form, integrated piece by piece.

    With E_a = s, E_b = r s: integral over r of (1 + r + sum_v max(q_v/q_a, r p_v/p_b))^-2.
    """
    out = np.zeros((3, 3))
    for a, b in itertools.product(range(3), repeat=2):
        if a == b:
            out[a, a] = 1 / sum(max(q[v] / q[a], p[v] / p[a]) for v in range(3))
            continue
        c = next(v for v in range(3) if v not in (a, b))
        low, high = q[b] / q[a], p[b] / p[a]
        knee = (q[c] / q[a]) / (p[c] / p[b])
        marks = sorted({low, high, *([knee] if low < knee < high else [])})
        for left, right in itertools.pairwise(marks) if low < high else ():
            middle = (left + right) / 2
            flat = q[c] / q[a] >= middle * p[c] / p[b]
            constant_, slope = (1 + q[c] / q[a], 1.0) if flat else (1.0, 1 + p[c] / p[b])
            ends = (constant_ + slope * left) * (constant_ + slope * right)
            out[a, b] += (right - left) / ends
    return out


def test_races_under_one_key_have_the_closed_form(monkeypatch):
    generator = np.random.default_rng(0)
    for _ in range(20):
        p, q = generator.dirichlet(np.ones(3), 2)

        def play(noise, p=p, q=q):
            return Draws(0).race(4, q), Draws(0).race(4, p)

        found = np.zeros((3, 3))
        for weight, pair in play_all(play, monkeypatch):
            found[pair] += weight
        expected = joint_of_two_races(p, q)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
        np.testing.assert_allclose(found.sum(axis=0), p, rtol=0, atol=1e-13)
        np.testing.assert_allclose(found.sum(axis=1), q, rtol=0, atol=1e-13)


def test_the_real_race_agrees_with_the_closed_form():
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])
    expected, count = joint_of_two_races(p, q), 3000
    seen = np.zeros((3, 3))
    for position in range(count):
        seen[Draws(2).race(position, q), Draws(2).race(position, p)] += 1
    possible = expected > 0
    assert (seen[~possible] == 0).all()
    parts = (seen[possible] - count * expected[possible]) ** 2 / (count * expected[possible])
    assert parts.sum() < 26.1  # chi-square, 8 degrees, 0.001


def test_races_under_different_keys_are_independent(monkeypatch):
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])

    def play(noise):
        return Draws(0).race(4, q), Draws(0).residual(4, p)

    found = np.zeros((3, 3))
    for weight, pair in play_all(play, monkeypatch):
        found[pair] += weight
    np.testing.assert_allclose(found, np.outer(q, p), rtol=0, atol=1e-14)


# --- mutants: what the enumerator must see ----------------------------------------------------

MUTATED = Case(markov(3, 40, order=2), markov(3, 41), depth(2), 3)


def mutate(monkeypatch, name: str) -> None:
    """Put one known way to get the token rule wrong in its place."""

    def shared_draft(self, start, offset, q):
        return rng.race(derive_key(Domain.DRAFT, self.seed, self.stream), start, q)

    def shared_accept(self, start, offset):
        key = derive_key(Domain.ACCEPT, self.seed, self.stream)
        return float(rng.uniforms(key, start, np.zeros(1, np.uint32))[0])

    def residual_by_draft_noise(self, position, law):
        return rng.race(derive_key(Domain.DRAFT, self.seed, self.stream), position, law)

    def backwards(p, q):
        return residual_distribution(q, p)

    def floored(p, q):
        mass = np.maximum(dense(p) - dense(q), 0.0) + 1e-2
        return mass / mass.sum()

    targets = {
        "residual is p": (token_rule, "residual_distribution", lambda p, q: p),
        "residual with an epsilon": (token_rule, "residual_distribution", floored),
        "residual of q": (token_rule, "residual_distribution", backwards),
        "every draft is kept": (token_rule, "accepts", lambda u, p, q: p > 0),
        "accepted by p alone": (token_rule, "accepts", lambda u, p, q: u < 0.5 * p / q),
        "<= instead of <, at u = 0": (token_rule, "accepts", lambda u, p, q: u * q <= p + 1e-300),
        "one coin for the block": (Draws, "accept", shared_accept),
        "one draft noise for the block": (Draws, "draft", shared_draft),
        "residual by the draft's noise": (Draws, "residual", residual_by_draft_noise),
    }  # fmt: skip
    monkeypatch.setattr(*targets[name])


@pytest.mark.parametrize("name", [
    "residual is p", "residual with an epsilon", "residual of q", "every draft is kept",
    "one coin for the block", "one draft noise for the block", "residual by the draft's noise",
])  # fmt: skip
def test_a_mutant_is_caught(name, monkeypatch):
    mutate(monkeypatch, name)
    assert total_variation("token", MUTATED, monkeypatch) > WRONG


def test_a_wrong_flip_is_caught(monkeypatch):
    """Coins are played beside the flip of the right rule: a rule that flips elsewhere shows."""
    mutate(monkeypatch, "accepted by p alone")
    assert total_variation("token", MUTATED, monkeypatch) > WRONG


def test_a_wrong_q_is_caught(monkeypatch):
    """Drafts from a truncated q, judged by the raw one."""
    raw = markov(3, 41)

    def truncated(history):
        row = raw(history).copy()
        row[np.argmin(row)] = 0.0
        return row / row.sum()

    case = replace(MUTATED, q=truncated)
    assert total_variation("token", case, monkeypatch) <= EXACT

    def play(noise):
        drafts, draws = (), Draws(1)
        while len(drafts) < 2:
            drafts += (draws.draft(0, len(drafts), truncated(drafts)),)
        p_rows = [MUTATED.p(drafts[:i]) for i in range(3)]
        q_rows = [raw(drafts[:i]) for i in range(2)]
        noise.flips = token_flips(p_rows, q_rows, drafts)
        verdict = verify("token", p_rows, q_rows, drafts, draws, start=0)
        return (*drafts[: verdict.accepted], verdict.next_token)[0]

    first = np.zeros(3)
    for weight, token in play_all(play, monkeypatch):
        first[token] += weight
    assert abs(first - MUTATED.p(())).sum() / 2 > WRONG


# --- keys by position alone -------------------------------------------------------------------
# They reuse, in the next round, noise of drafts that stood behind a rejection. The token rule never
# looked at those, so it stays exact; a rule that does look, like the block rule (Sun et al. 2024,
# arXiv 2403.10444), does not. Here it is written out, small, to show that the enumerator can tell.


def block_chances(p_rows, q_rows, drafts):
    """(P_0..P_K, h_1..h_K)."""
    kept, flips = [1.0], []
    for p, q, x in zip(p_rows, q_rows, drafts, strict=False):
        kept.append(min(1.0, kept[-1] * probability(p, x) / probability(q, x)))
    for i in range(1, len(drafts)):
        above = np.maximum(kept[i] * dense(p_rows[i]) - dense(q_rows[i]), 0).sum()
        below = above + 1 - kept[i]
        flips.append(1.0 if below == 0 else above / below)
    return kept, [*flips, kept[-1]]


def verify_block(p_rows, q_rows, draft, draws, start, eos_ids):
    kept, flips = block_chances(p_rows, q_rows, draft)
    coins = [draws.accept(start, i) for i in range(len(draft))]
    tau = max(
        (i + 1 for i, (u, h) in enumerate(zip(coins, flips, strict=True)) if u < h), default=0
    )
    if tau == len(draft):
        return Verdict(tau, draws.bonus(start + tau, p_rows[tau]), ())
    rest = np.maximum(kept[tau] * dense(p_rows[tau]) - dense(q_rows[tau]), 0)
    return Verdict(tau, draws.residual(start + tau, rest / rest.sum()), ())


def position_only(monkeypatch) -> None:
    monkeypatch.setattr(
        Draws,
        "draft",
        lambda self, start, offset, q: rng.race(
            derive_key(Domain.DRAFT, self.seed, self.stream), start + offset, q
        ),
    )


@pytest.fixture
def block_rule(monkeypatch):
    monkeypatch.setitem(RULES, "block", verify_block)
    monkeypatch.setitem(FLIPS, "block", lambda *rows: block_chances(*rows)[1])
    return "block"


def test_keys_by_position_alone_leave_the_token_rule_exact(monkeypatch):
    position_only(monkeypatch)
    assert total_variation("token", MUTATED, monkeypatch) <= EXACT


def test_keys_by_position_alone_are_caught_under_a_block_rule(block_rule, monkeypatch):
    assert total_variation(block_rule, MUTATED, monkeypatch) <= EXACT
    position_only(monkeypatch)
    assert total_variation(block_rule, MUTATED, monkeypatch) > WRONG


# --- the interface ----------------------------------------------------------------------------


class Fixed:
    """Randomness with given coins; every token draw answers with the mode of its law."""

    def __init__(self, *coins: float):
        self.coins, self.asked = list(coins), []

    def accept(self, start, offset):
        self.asked.append(("accept", start, offset))
        return self.coins.pop(0)

    def race(self, position, law):
        self.asked.append(("race", position))
        return int(np.argmax(dense(law)))

    def residual(self, position, law):
        self.asked.append(("residual", position))
        return int(np.argmax(dense(law)))

    def bonus(self, position, law):
        self.asked.append(("bonus", position))
        return int(np.argmax(dense(law)))


P = [np.array([0.25, 0.75, 0.0]), np.array([0.5, 0.0, 0.5]), np.array([0.0, 0.1, 0.9])]
Q = [np.array([0.5, 0.25, 0.25]), np.array([1.0, 0.0, 0.0])]


def test_the_token_rule_asks_for_what_the_table_says():
    draws = Fixed(0.49, 0.6)
    assert verify("token", P, Q, [0, 0], draws, start=7) == Verdict(1, 2, (0.5, 0.5))
    assert draws.asked == [("accept", 7, 0), ("accept", 7, 1), ("residual", 8)]
    draws = Fixed(0.49, 0.49)
    assert verify("token", P, Q, [0, 0], draws, start=7) == Verdict(2, 2, (0.5, 0.5))
    assert draws.asked[-1] == ("bonus", 9)


def test_the_token_rule_is_strict():
    assert verify("token", P[:2], Q[:1], [0], Fixed(0.5), start=0).accepted == 0
    assert verify("token", P[:2], Q[:1], [2], Fixed(0.0), start=0) == Verdict(0, 1, (0.0,))


def test_after_eos_nothing_is_kept_and_no_bonus_drawn():
    for rule, draws in (("token", Fixed(0.49)), ("coupled", Fixed())):
        draft = [0, 0] if rule == "token" else [1, 0]
        verdict = verify(rule, P, Q, draft, draws, start=7, eos_ids={draft[0]})
        assert (verdict.accepted, verdict.next_token) == (1, None)
        assert len(draws.asked) == 1


def test_rows_after_an_eos_are_not_looked_at():
    broken = [P[0], None, None]
    for rule, token in (("token", 0), ("coupled", 1)):
        verdict = verify(
            rule, broken, [Q[0], None], [token, 0], Fixed(0.1), start=0, eos_ids=[token]
        )
        assert (verdict.accepted, verdict.next_token) == (1, None)


def test_a_round_without_drafts_is_plain_decoding():
    for rule in RULES:
        draws = Fixed()
        assert verify(rule, P[:1], [], [], draws, start=7) == Verdict(0, 1, ())
        assert draws.asked == [("race", 7)]


def test_the_interface_refuses():
    with pytest.raises(ValueError, match="rule"):
        verify("typical", P, Q, [0, 0], Fixed(), start=0)
    for p_rows, q_rows, draft in (
        (P[:2], Q, [0, 0]),
        (P, Q[:1], [0, 0]),
        (P, Q, [0]),
        ([], [], []),
    ):
        with pytest.raises(ValueError, match="rows"):
            verify("token", p_rows, q_rows, draft, Fixed(), start=0)
