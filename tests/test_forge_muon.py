"""Muon's orthogonal matrices, and threads that share a batch."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from mtplx.forge.muon import Muon, orthogonal
from mtplx.forge.streams import shares, side_by_side


def with_singular_values(rows, columns, values, seed=0):
    """A matrix with these singular values, and its U and V^T."""
    random = np.random.default_rng(seed)
    n = min(rows, columns)
    u, _ = np.linalg.qr(random.standard_normal((rows, n)))
    v, _ = np.linalg.qr(random.standard_normal((columns, n)))
    return (u * values) @ v.T, u, v.T


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (24, 30), (24, 96), (96, 24), (5, 160)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_singular_values_come_near_to_1_and_vectors_stay(rows, columns, scale):
    values = np.logspace(0, -2.5, min(rows, columns))
    matrix, u, vt = with_singular_values(rows, columns, scale * values)
    found = np.asarray(orthogonal(mx.array(matrix.astype(np.float32))), np.float64)
    inside = u.T @ found @ vt.T
    assert (np.diag(inside) > 0.8).all()
    assert (np.diag(inside) < 1.2).all()
    np.testing.assert_allclose(inside - np.diag(np.diag(inside)), 0, atol=2e-3)
    np.testing.assert_allclose(u @ inside @ vt, found, atol=2e-3)


def test_an_oblong_matrix_takes_the_same_steps_as_a_square_one():
    values = np.logspace(0, -4, 20)
    oblong, u, vt = with_singular_values(20, 200, values)
    square = (u * values) @ u.T
    matrices = [mx.array(m.astype(np.float32)) for m in (oblong, square)]
    wide, narrow = (np.asarray(orthogonal(matrix)) for matrix in matrices)
    found = np.diag(u.T @ wide @ vt.T), np.diag(u.T @ narrow @ u)
    np.testing.assert_allclose(*found, atol=5e-3)


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


def test_items_are_worked_on_side_by_side_each_on_its_own_thread():
    meet = threading.Barrier(2, timeout=30)

    def work(item):
        meet.wait()
        array = mx.ones(3) * item
        mx.eval(array)
        return threading.get_ident(), array

    first, second = side_by_side(work, [1, 2]), side_by_side(work, [3, 4])
    assert [float(array.sum()) for _, array in first + second] == [3, 6, 9, 12]
    threads = [thread for thread, _ in first + second]
    assert threads[:2] == threads[2:]
    assert len(set(threads)) == 2
    assert threading.get_ident() not in threads


def test_what_one_of_them_raises_is_raised_when_all_have_ended():
    ended = []

    def work(item):
        if item == 0:
            raise ValueError("of one")
        ended.append(item)

    with pytest.raises(ValueError, match="of one"):
        side_by_side(work, [0, 1])
    assert ended == [1]
    assert side_by_side(lambda _: threading.get_ident(), [5]) == [threading.get_ident()]


def test_shares_are_even_and_none_is_empty():
    assert [len(range(7)[part]) for part in shares(7, 3)] == [2, 2, 3]
    assert [len(range(2)[part]) for part in shares(2, 4)] == [1, 1]
