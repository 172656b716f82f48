"""Laws without filters and races over a whole vocabulary, at every level, against NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mtplx import native as seam
from mtplx import rng
from mtplx.distribution import SparseDistribution
from mtplx.errors import NonFiniteLogitsError
from mtplx.fast_sampling import sparse_distributions_from_mlx_logits
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits

native = seam.status().native
pytestmark = pytest.mark.skipif(native is None, reason="the CPU kernels are not installed")
LEVELS = native.levels() if native else []
INF, NAN = float("inf"), float("nan")
PLAIN = {"top_p": 1.0, "top_k": 0}


def rows_of(size):
    random = np.random.default_rng(size)
    row = 4 * random.standard_normal(size)
    banned = np.where(random.random(size) < 0.5, -INF, row)
    banned[random.integers(size)] = 1.0
    spread = np.linspace(-1500, 0, size)
    rows = [row, banned, spread, np.zeros(size), 1e30 * row, row - 5e4]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 200, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1e-3, 1e-30, 40.0, 1e30])
def test_the_law_is_the_reference_s(level, size, temperature):
    rows, config = rows_of(size), SamplerConfig(temperature=temperature, **PLAIN)
    found = native.whole_law(mx.array(rows), temperature, level)
    for row, (probs, positive) in zip(rows, found, strict=True):
        expected = distribution_from_logits(row.astype(np.float64), config)
        np.testing.assert_allclose(probs, expected, rtol=3e-15, atol=1e-320)
        assert positive == (probs > 0).sum()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("place", [0, 64, 70])
def test_a_broken_row_has_no_law_and_does_not_touch_its_neighbours(level, value, place):
    rows = rows_of(71)[:3]
    rows[1, place] = value
    one, two, three = native.whole_law(mx.array(rows), 1.0, level)
    assert (two[0].size, two[1]) == (0, 0)
    for row, (probs, _) in ((rows[0], one), (rows[2], three)):
        assert np.array_equal(probs, native.whole_law(mx.array(row[None]), 1.0, level)[0][0])
    assert native.whole_law(mx.array(np.full((1, 71), -INF, np.float32)), 1.0)[0][1] == 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        native.whole_law(mx.zeros((1, 8)), temperature)


def test_the_one_function_takes_it_for_every_row_without_filters():
    rows, config = rows_of(200)[:3], SamplerConfig(temperature=0.8, **PLAIN)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        given = mx.array(rows).astype(dtype)
        laws = sparse_distributions_from_mlx_logits(given, config)
        for row, law in zip(np.array(given.astype(mx.float32)), laws, strict=True):
            expected = distribution_from_logits(row.astype(np.float64), config)
            np.testing.assert_allclose(law.to_dense(), expected, rtol=3e-15, atol=1e-320)
            assert (law.probs > 0).all()
    penalised = SamplerConfig(temperature=0.8, presence_penalty=0.5, **PLAIN)
    counts = [{3: 2}, None, {5: 1}]
    laws = sparse_distributions_from_mlx_logits(mx.array(rows), penalised, token_counts=counts)
    for row, count, law in zip(rows, counts, laws, strict=True):
        expected = distribution_from_logits(row.astype(np.float64), penalised, token_counts=count)
        np.testing.assert_allclose(law.to_dense(), expected, rtol=1e-6, atol=1e-12)
    with pytest.raises(NonFiniteLogitsError, match="row 1"):
        sparse_distributions_from_mlx_logits(mx.array([[0.0, 1.0], [NAN, 0.0]]), config)


# --- races ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [2, 3, 63, 64, 65, 129, 1000, 49152])
def test_a_race_has_numpy_s_winner(level, size, monkeypatch):
    random = np.random.default_rng(size)
    monkeypatch.setattr(seam, "loaded", None)
    for trial in range(200 if size <= 1000 else 12):
        ids = np.sort(random.choice(200_000, size, replace=False))
        probs = random.exponential(size=size) ** random.integers(1, 30)
        law = SparseDistribution(ids, probs, 200_000)
        key = tuple(int(k) for k in random.integers(0, 2**32, size=2))
        found = native.race(*key, trial, law.token_ids, law.probs, level)
        assert found == rng.race(key, trial, law)


@pytest.mark.parametrize("level", LEVELS)
def test_infinitely_late_clocks_do_not_win(level):
    ids = np.arange(130)
    probs = np.full(130, 5e-324)
    assert native.race(1, 2, 3, ids, probs, level) == 0  # all are: the first
    probs[97] = 1e-300
    assert native.race(1, 2, 3, ids, probs, level) == 97
