"""The interface of the rules: which draws they ask for, with what, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from mtplx.distribution import as_dense
from mtplx.verify import RULES, Verdict, verify


class Fixed:
    """Randomness with given coins; every token draw answers with the mode of its law."""

    def __init__(self, *coins: float):
        self.coins, self.asked = list(coins), []

    def accept(self, start, offset):
        self.asked.append(("accept", start, offset))
        return self.coins.pop(0)

    def race(self, position, law):
        self.asked.append(("race", position))
        return int(np.argmax(as_dense(law)))

    def residual(self, position, law):
        self.asked.append(("residual", position))
        return int(np.argmax(as_dense(law)))

    def bonus(self, position, law):
        self.asked.append(("bonus", position))
        return int(np.argmax(as_dense(law)))


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
    draws.residual = lambda position, law: seen.append(as_dense(law)) or 2
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
