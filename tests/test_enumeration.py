"""What the enumerator is made of: races that share a noise, and races that do not."""

from __future__ import annotations

import numpy as np

from mtplx.certify.forking import joint_of_two_races, play_all
from mtplx.rng import Draws


def test_races_under_one_key_have_the_closed_form():
    generator = np.random.default_rng(0)
    for _ in range(20):
        p, q = generator.dirichlet(np.ones(3), 2)

        def play(noise, p=p, q=q):
            return Draws(0).race(4, q), Draws(0).race(4, p)

        found = np.zeros((3, 3))
        for weight, pair in play_all(play):
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


def test_races_under_different_keys_are_independent():
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])

    def play(noise):
        return Draws(0).race(4, q), Draws(0).residual(4, p)

    found = np.zeros((3, 3))
    for weight, pair in play_all(play):
        found[pair] += weight
    np.testing.assert_allclose(found, np.outer(q, p), rtol=0, atol=1e-14)
