"""What the enumerator must see, and what it is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from forking import joint_of_two_races, play_all
from test_law import (
    EXACT,
    WRONG,
    Case,
    dense,
    depth,
    markov,
    token_flips,
    total_variation,
)

import mtplx.verify.token as token_rule
from mtplx import rng
from mtplx.rng import Domain, Draws, derive_key
from mtplx.sampling import (
    residual_distribution,
)
from mtplx.verify import RULES, Verdict, verify

# --- the enumerator itself --------------------------------------------------------------------


def test_races_under_one_key_have_the_closed_form(monkeypatch):
    generator = np.random.default_rng(0)
    for _ in range(20):
        p, q = generator.dirichlet(np.ones(3), 2)

        def play(noise, p=p, q=q):
            return Draws(0).race(4, q), Draws(0).race(4, p)

        found = np.zeros((3, 3))
        for weight, pair in play_all(play, monkeypatch):
            found[pair] += weight
        expected = joint_of_two_races(tuple(q), tuple(p))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
        np.testing.assert_allclose(found.sum(axis=0), p, rtol=0, atol=1e-13)
        np.testing.assert_allclose(found.sum(axis=1), q, rtol=0, atol=1e-13)


def test_the_real_race_agrees_with_the_closed_form():
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])
    expected, count = joint_of_two_races(tuple(q), tuple(p)), 3000
    seen = np.zeros((3, 3))
    for position in range(count):
        seen[Draws(2).race(position, q), Draws(2).race(position, p)] += 1
    possible = expected > 0
    assert (seen[~possible] == 0).all()
    parts = (seen[possible] - count * expected[possible]) ** 2 / (count * expected[possible])
    assert parts.sum() < 26.1  # chi-square, 8 degrees, 0.001


def test_the_closed_form_of_more_tokens():
    """Its margins are the laws, zeros included, and equal laws never disagree."""
    generator = np.random.default_rng(1)
    for _ in range(20):
        p, q = generator.dirichlet(np.ones(5), 2)
        p[generator.integers(5)], q[generator.integers(5)] = 0.0, 0.0
        p, q = p / p.sum(), q / q.sum()
        found = joint_of_two_races(tuple(q), tuple(p))
        np.testing.assert_allclose(found.sum(axis=0), p, rtol=0, atol=1e-13)
        np.testing.assert_allclose(found.sum(axis=1), q, rtol=0, atol=1e-13)
        same = joint_of_two_races(tuple(p), tuple(p))
        np.testing.assert_allclose(same, np.diag(p), rtol=0, atol=1e-13)


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
# looked at those, so it stays exact; the block rule does look, and does not.


def position_only(monkeypatch) -> None:
    monkeypatch.setattr(
        Draws,
        "draft",
        lambda self, start, offset, q: rng.race(
            derive_key(Domain.DRAFT, self.seed, self.stream), start + offset, q
        ),
    )


def test_keys_by_position_alone_leave_the_token_rule_exact(monkeypatch):
    position_only(monkeypatch)
    assert total_variation("token", MUTATED, monkeypatch) <= EXACT


def test_keys_by_position_alone_are_caught_under_the_block_rule(monkeypatch):
    assert total_variation("block", MUTATED, monkeypatch) <= EXACT
    position_only(monkeypatch)
    assert total_variation("block", MUTATED, monkeypatch) > WRONG


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


def test_the_block_rule_asks_from_the_longest_part_on():
    """P = 1/2, 1/4; h_1 = 1/4 / (1/4 + 1/2): of p' - q' / 2 = (1/4, 0, 1/2) less (1, 0, 0)."""
    third, rows = 1 / 3, (P, Q, [0, 0])
    draws = Fixed(0.25, 0.34)
    assert verify("block", *rows, draws, start=7) == Verdict(0, 1, (pytest.approx(third), 0.25))
    assert draws.asked == [("accept", 7, 1), ("accept", 7, 0), ("residual", 7)]
    draws = Fixed(0.25, 0.33)
    assert verify("block", *rows, draws, start=7).accepted == 1
    assert draws.asked[-1] == ("residual", 8)
    draws = Fixed(0.24)
    assert verify("block", *rows, draws, start=7).accepted == 2
    assert draws.asked == [("accept", 7, 1), ("bonus", 9)]


def test_the_block_rules_residual_is_scaled():
    """P_1 = 1/2: of (1/2 p' - q')+ only token 2 is left; the token rule's p' - q' has token 1."""
    p = [np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.6, 0.4]), np.array([1.0, 0.0, 0.0])]
    q = [np.array([1.0, 0.0, 0.0]), np.array([0.5, 0.5, 0.0])]
    seen = []
    draws = Fixed(0.99, 0.0)
    draws.residual = lambda position, law: seen.append(dense(law)) or 2
    assert verify("block", p, q, [0, 0], draws, start=0).accepted == 1
    np.testing.assert_array_equal(seen, [[0.0, 0.0, 1.0]])


def test_after_eos_nothing_is_kept_and_no_bonus_drawn():
    for rule, draws in (("token", Fixed(0.49)), ("coupled", Fixed()), ("block", Fixed(0.49))):
        draft = [1, 0] if rule == "coupled" else [0, 0]
        verdict = verify(rule, P, Q, draft, draws, start=7, eos_ids={draft[0]})
        assert (verdict.accepted, verdict.next_token) == (1, None)
        assert len(draws.asked) == 1


def test_rows_after_an_eos_are_not_looked_at():
    broken = [P[0], None, None]
    for rule, token in (("token", 0), ("coupled", 1), ("block", 0)):
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
