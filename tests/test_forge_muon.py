"""Muon: what its steps make of singular values, and the momentum that it moves along."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mtplx.forge.muon import _MARGIN, _STEPS, Muon, orthogonal


def with_singular_values(rows, columns, values, seed=0):
    """A matrix with these singular values, and its U and V^T."""
    random = np.random.default_rng(seed)
    n = min(rows, columns)
    u, _ = np.linalg.qr(random.standard_normal((rows, n)))
    v, _ = np.linalg.qr(random.standard_normal((columns, n)))
    return (u * values) @ v.T, u, v.T


def steps_of(values):
    """What the steps make of singular values whose matrix has the norm 1."""
    for a, b, c in _STEPS:
        values = a * values + b * values**3 + c * values**5
    return values


def test_the_steps_bring_singular_values_near_to_1():
    found = steps_of(np.geomspace(1e-3, 1 / _MARGIN, 4001))
    assert found.min() > 0.875
    assert found.max() < 1.124
    small = np.logspace(-6, -3, 100)
    assert (steps_of(small) / small > 800).all()


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (24, 30), (24, 96), (96, 24), (5, 160)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_singular_values_take_these_steps_and_vectors_stay(rows, columns, scale):
    values = np.logspace(0, -4, min(rows, columns))
    matrix, u, vt = with_singular_values(rows, columns, scale * values)
    found = np.asarray(orthogonal(mx.array(matrix.astype(np.float32))), np.float64)
    inside = u.T @ found @ vt.T
    expected = steps_of(values / (_MARGIN * np.linalg.norm(values)))
    np.testing.assert_allclose(np.diag(inside), expected, atol=1e-2)
    np.testing.assert_allclose(inside - np.diag(np.diag(inside)), 0, atol=5e-3)
    np.testing.assert_allclose(u @ inside @ vt, found, atol=5e-3)


def test_nothing_moves_along_no_gradient():
    assert (np.asarray(orthogonal(mx.zeros((6, 18)))) == 0).all()
    assert (np.asarray(orthogonal(mx.zeros((6, 6)))) == 0).all()


def test_muon_moves_along_its_momentum():
    gradients = np.random.default_rng(1).standard_normal((2, 32, 8)).astype(np.float32)
    weight, optimiser = mx.ones((32, 8)), Muon(0.1, momentum=0.9)
    parameters = {"w": weight}
    momentum, expected = np.zeros((32, 8)), np.ones((32, 8))
    for gradient in gradients:
        parameters = optimiser.apply_gradients({"w": mx.array(gradient)}, parameters)
        momentum = 0.9 * momentum + 0.1 * gradient
        update = orthogonal(mx.array((0.9 * momentum + 0.1 * gradient).astype(np.float32)))
        expected = expected - 0.1 * 2 * np.asarray(update)  # sqrt(32 / 8) = 2
    np.testing.assert_allclose(np.asarray(parameters["w"]), expected, atol=1e-4)
