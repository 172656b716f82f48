"""What the extension does for draws, laws and verification, against the NumPy code it replaces."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mtplx import native as seam
from mtplx import rng
from mtplx.distribution import SparseDistribution, excess, support
from mtplx.fast_sampling import _host_sparse_distribution
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import deterministic_top_k_order, distribution_from_logits

WORD = 2**32 - 1
INF = float("inf")


@pytest.fixture(scope="module")
def native():
    found = seam.status().native
    if found is None:
        pytest.skip(f"the extension is not there: {seam.status().reason}")
    return found


@pytest.fixture
def by_numpy(monkeypatch):
    """Calls a function as it is without the kernels."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(seam, "loaded", None)
            return function(*arguments)

    return call


def random_law(generator, vocab=400, most=40):
    ids = generator.permutation(vocab)[: generator.integers(1, most + 1)]
    return SparseDistribution(ids, generator.exponential(size=ids.size) ** 6, vocab)


# --- noise ------------------------------------------------------------------------------------


def test_uniforms_are_numpys_bit_for_bit(native, by_numpy):
    generator = np.random.default_rng(0)
    for _ in range(300):
        key = tuple(int(k) for k in generator.integers(0, 2**32, size=2))
        position = int(generator.integers(0, 2**32))
        ids = generator.integers(0, 2**32, size=40)
        expected = by_numpy(rng.uniforms, key, position, ids)
        found = [native.uniform(*key, position, int(token)) for token in ids]
        np.testing.assert_array_equal(found, expected)
        one = ids[:1]
        assert rng.uniforms(key, position, one) == by_numpy(rng.uniforms, key, position, one)
    for words in ((0, 0, 0, 0), (WORD, WORD, WORD, WORD)):
        expected = by_numpy(rng.uniforms, words[:2], words[2], np.array([words[3]] * 2))
        assert native.uniform(*words) == expected[0]


def test_a_race_has_numpys_winner(native, by_numpy):
    generator = np.random.default_rng(1)
    laws = [random_law(generator) for _ in range(100)]
    for position in range(20_000):
        law, key = laws[position % 100], (position * 7919, 5)
        assert native.race(*key, position, law.token_ids, law.probs) == by_numpy(
            rng.race, key, position, law
        )


def test_clocks_are_as_exact_as_floats(native):
    """A token whose clock is earlier by 1e-13 of itself wins, wherever it stands."""
    ids = np.array([3, 900, 40_000])
    for position in range(2000):
        late = np.array([rng.exponentials((1, 2), position, ids[i : i + 1])[0] for i in range(3)])
        for winner in range(3):
            probs = late.copy()
            probs[winner] *= 1 + 1e-13
            assert native.race(1, 2, position, ids, probs) == ids[winner]
        # A tie of two clocks that never ring, and of any others, goes to the lower id.
    assert native.race(1, 2, 0, ids, np.array([5e-324, 1e-320, 5e-324])) == 3


def test_a_race_refuses_what_is_no_law(native):
    ids, probs = np.array([1, 2]), np.array([0.5, 0.5])
    for wrong in ((ids[:1], probs), (ids[:0], probs[:0])):
        with pytest.raises(ValueError, match="of one length"):
            native.race(0, 0, 0, *wrong)
    for key in ((-1, 0), (0, 2**32)):
        with pytest.raises(TypeError):
            native.race(*key, 0, ids, probs)


def test_the_kernels_draw_where_they_are_loaded(native, monkeypatch):
    law = SparseDistribution(np.array([1, 5]), np.array([0.5, 0.5]), 9)
    assert seam.loaded is native
    monkeypatch.setattr(rng, "exponentials", lambda *_: pytest.fail("NumPy's noise"))
    assert rng.Draws(1).race(0, law) in (1, 5)


# --- what p has more than q -------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-300])
def test_the_excess_is_numpys_bit_for_bit(native, by_numpy, scale):
    generator = np.random.default_rng(2)
    for _ in range(500):
        p, q = random_law(generator, 60), random_law(generator, 60)
        for pair in ((p, q), (p, p), (q, p)):
            found, expected = excess(*pair, scale), by_numpy(excess, *pair, scale)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-300])
def test_the_excess_of_a_law_of_all_ids_is_numpys_bit_for_bit(native, by_numpy, scale):
    generator = np.random.default_rng(3)
    for size in (1, 2, 63, 700):
        p = SparseDistribution(np.arange(size), generator.random(size), size)
        for count in {1, size // 2 + 1, size}:
            ids = generator.permutation(size)[:count]
            laws = [
                SparseDistribution(ids, w, size) for w in (generator.random(count), p.probs[ids])
            ]
            ids = np.sort(ids)  # and one that is above p, so that nothing of its ids is left
            laws.append(SparseDistribution.unchecked(ids, 2 * p.probs[ids], size))
            for q in laws:
                found, expected = excess(p, q, scale), by_numpy(excess, p, q, scale)
                for a, b in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(a, b)
                    assert a.dtype == b.dtype


def test_a_probability_is_found_by_its_id(native, by_numpy):
    law = random_law(np.random.default_rng(6), 60)
    for token in range(-1, law.vocab_size + 1):
        expected = by_numpy(law.probability, token)
        assert law.probability(token) == expected
        assert type(law.probability(token)) is float
    with pytest.raises(ValueError, match="of one length"):
        native.probability(law.token_ids, law.probs[:1], 3)


def test_laws_apart_and_one_within_the_other(native, by_numpy):
    low = SparseDistribution(np.arange(5), np.ones(5), 20)
    high = SparseDistribution(np.arange(15, 20), np.ones(5), 20)
    wide = SparseDistribution(np.arange(20), np.ones(20), 20)
    for pair in ((low, high), (high, low), (low, wide), (wide, low)):
        found, expected = excess(*pair), by_numpy(excess, *pair)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
    with pytest.raises(ValueError, match="of one length"):
        native.excess(low.token_ids, low.probs[:2], high.token_ids, high.probs, 1.0)


# --- steps 4 to 6 of the law ------------------------------------------------------------------


def numpy_finish(row, config, mass):
    """The law by NumPy from all of a row in order, and the kernel's mass."""
    limited = 0 < config.top_k < row.size
    wanted = 1 if config.temperature <= 0 else config.top_k if limited else row.size
    ids = deterministic_top_k_order(row.astype(np.float64), wanted)
    return _host_sparse_distribution(
        row[ids], config, token_ids=ids, vocab_size=row.size, mass=mass or None
    )


EXTREMES = [
    SamplerConfig(temperature=t, top_p=p, top_k=k, min_p=m)
    for t in (0.0, 1e-38, 0.6, 1.0, 3e3)
    for p in (1e-9, 0.5, 0.95, 1.0)
    for k in (0, 1, 20, 3000)
    for m in (0.0, 0.02)
]


@pytest.mark.parametrize("scale", [0.001, 2.5, 1e4])
def test_the_law_is_finished_as_numpy_finishes_it(native, scale):
    generator = np.random.default_rng(3)
    rows = (generator.normal(size=(4, 3000)) * scale).astype(np.float32)
    rows[1, generator.random(3000) < 0.9] = -INF
    rows[2] = -INF
    rows[2, 77] = -4.0  # one allowed token
    rows[3] = np.round(rows[3] / scale * 4)  # ties
    for config in EXTREMES:
        request = (config.temperature, config.top_p, config.min_p, config.top_k)
        for row, (ids, probs, mass, *_) in zip(rows, native.law(rows, *request), strict=True):
            expected = numpy_finish(row, config, mass)
            np.testing.assert_array_equal(ids, expected.token_ids)
            np.testing.assert_allclose(probs, expected.probs, rtol=1e-15, atol=0)
            assert math.isclose(probs.sum(), 1.0, rel_tol=1e-14)


def test_rows_of_mlx_give_the_laws_of_the_same_rows_of_numpy(native):
    rows = np.round(np.random.default_rng(8).normal(size=(3, 700)) * 3, 1).astype(np.float32)
    request = 0.7, 0.9, 0.01, 50
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        lazy = mx.array(rows).astype(dtype) + 1  # not computed yet
        whole = np.array(lazy.astype(mx.float32))
        for given, same in ((lazy, whole), (lazy[:, ::2], np.ascontiguousarray(whole[:, ::2]))):
            for found, expected in zip(
                native.law(given, *request), native.law(same, *request), strict=True
            ):
                assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="rows, vocab"):
        native.law(mx.zeros(4), *request)


def test_a_law_of_the_kernels_is_held_as_any_other(native):
    rows = (np.random.default_rng(4).normal(size=(1, 5000)) * 3).astype(np.float32)
    config = SamplerConfig(temperature=1.5, top_p=0.999, top_k=0)
    ((ids, probs, *_),) = native.law(rows, 1.5, 0.999, 0.0, 0)
    held = SparseDistribution.unchecked(ids, probs, 5000)
    checked = SparseDistribution(ids[::-1], probs[::-1], 5000)
    np.testing.assert_array_equal(held.token_ids, checked.token_ids)
    np.testing.assert_allclose(held.probs, checked.probs, rtol=1e-15)
    np.testing.assert_allclose(
        held.to_dense(), distribution_from_logits(rows[0], config), rtol=1e-12
    )
    assert all(part.flags.c_contiguous for part in support(held))


# --- the seam ---------------------------------------------------------------------------------


def test_kernels_of_another_version_are_not_used(native, monkeypatch):
    import mtplx_kernels

    monkeypatch.setattr(mtplx_kernels, "__version__", "0.2.0")
    found = seam.status.__wrapped__()
    assert found.native is None
    assert found.reason == f"mtplx-kernels 0.2.0 is not {seam.VERSION}"
