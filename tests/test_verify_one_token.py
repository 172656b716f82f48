"""One token drawn from a law or judged against it, and the law against its oracle."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from law_oracle import (
    FORMS,
    INF,
    NAN,
    Uniforms,
    build,
    cases,
    checked,
    dense,
    law,
    oracle,
    oracle_logits,
    weights,
)

from mtplx.sampling import (
    NonFiniteLogitsError,
    SparseDistribution,
    distribution_from_logits,
    sample_from_distribution,
    verify_one_token,
)

# --- sampling and verify_one_token ------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_sample_from_distribution_is_the_inverse_cdf_in_id_order(form):
    found = law(form, [0.0, 0.25, 0.0, 0.5, 0.25])
    for uniform, token in (
        (0.0, 1), (0.249, 1), (0.251, 3), (0.749, 3), (0.751, 4), (1 - 2**-53, 4),
    ):  # fmt: skip
        assert sample_from_distribution(found, Uniforms(uniform)) == token
    assert isinstance(sample_from_distribution(found), int)


def test_sample_from_distribution_at_exact_thresholds():
    for form in ("dense", "sparse"):
        found = law(form, [0.25, 0.5, 0.25])
        assert sample_from_distribution(found, Uniforms(0.25)) == 1
        assert sample_from_distribution(found, Uniforms(0.75)) == 2
    unsorted = SparseDistribution(np.array([2, 0, 1]), np.array([0.25, 0.25, 0.5]), 3)
    assert [sample_from_distribution(unsorted, Uniforms(u)) for u in (0.1, 0.5, 0.9)] == [0, 1, 2]


@checked(200)
@given(weights, st.integers(0, 2**32 - 1), st.randoms())
def test_dense_and_sparse_sample_the_same_token(values, seed, shuffle):
    assume(sum(values) > 0)
    p = np.array(values) / sum(values)
    ids = np.arange(p.size)
    shuffle.shuffle(ids)
    forms = (p, law("sparse", p), SparseDistribution(ids, p[ids], p.size))
    generators = [np.random.default_rng(seed) for _ in forms]
    for _ in range(5):
        tokens = {sample_from_distribution(f, g) for f, g in zip(forms, generators, strict=True)}
        assert len(tokens) == 1
        assert p[tokens.pop()] > 0
    # one uniform a token: all generators stand where five uniforms have gone
    reference = np.random.default_rng(seed)
    reference.random(5)
    assert all(g.random() == h for g, h in zip(generators, [reference.random()] * 3, strict=True))


def test_sample_from_distribution_refuses_what_is_no_law():
    with pytest.raises(ValueError, match="negative"):
        sample_from_distribution(np.array([1.5, -0.5]), Uniforms(0.1))
    for bad in ([0.0, 0.0], [INF, 1.0], [NAN, 1.0]):
        with pytest.raises(NonFiniteLogitsError):
            sample_from_distribution(np.array(bad), Uniforms(0.1))


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_verify_one_token_is_strict(form):
    p, q = law(form, [0.25, 0.75, 0.0]), law(form, [0.5, 0.25, 0.25])
    below = verify_one_token(p, q, 0, Uniforms(math.nextafter(0.5, 0)))
    assert (below.accepted, below.token_id, below.accept_probability) == (True, 0, 0.5)
    at = verify_one_token(p, q, 0, Uniforms(0.5, 0.3))
    assert (at.accepted, at.token_id, at.accept_probability) == (False, 1, 0.5)
    zero = verify_one_token(p, q, 2, Uniforms(0.0, 0.3))
    assert (zero.accepted, zero.token_id, zero.accept_probability) == (False, 1, 0.0)


def test_verify_one_token_uses_one_uniform_more_after_a_rejection():
    p, q = np.array([0.0, 0.5, 0.5]), np.array([1.0, 0.0, 0.0])
    uniforms = Uniforms(0.0, 0.6, 0.9)
    assert verify_one_token(p, q, 0, uniforms).token_id == 2
    assert uniforms.values == [0.9]
    uniforms = Uniforms(0.9, 0.8)
    assert verify_one_token(p, p, 1, uniforms).accepted
    assert uniforms.values == [0.8]


@pytest.mark.parametrize("form", FORMS)
def test_verify_one_token_follows_the_target(form):
    p, q = law(form, [0.1, 0.2, 0.3, 0.4, 0.0]), law(form, [0.4, 0.3, 0.0, 0.1, 0.2])
    generator, count = np.random.default_rng(5), 8000
    seen = np.zeros(5)
    for _ in range(count):
        seen[
            verify_one_token(p, q, sample_from_distribution(q, generator), generator).token_id
        ] += 1
    expected = dense(p)[:4] * count
    assert seen[4] == 0
    assert ((seen[:4] - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees, 0.001


@checked(400)
@given(cases())
def test_the_law_is_the_oracle(case):
    row, config, counts, overlay, prompt = case
    expected, margin = oracle(row, config, counts, overlay, prompt)
    assume(margin > 1e-9)
    got = distribution_from_logits(
        row, config, token_counts=counts, penalty_overlay=overlay, prompt_ids=prompt
    )
    assert got.dtype == np.float64
    assert np.flatnonzero(got).tolist() == [i for i, p in enumerate(expected) if p > 0]
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=0)


@checked(200)
@given(cases())
def test_the_twin_is_the_oracle(case):
    row, config, counts, overlay, prompt = case
    expected, margin = oracle(row, config, counts, overlay, prompt)
    # The twin's logits after bias and penalties are float32: 60 / 0.3 makes that 2e-5 of a weight.
    assume(margin > 1e-4)
    after = sorted(oracle_logits(row, config, counts, overlay, prompt))
    gaps = [b - a for a, b in pairwise(after) if b != a]
    assume(not gaps or min(gaps) > 1e-4)
    ranks = len(set(after)) == len(after) or config.repetition_penalty == 1.0
    assume(ranks)  # rounding may turn two tied logits into two that are not, or back
    got = build("mlx", row, config, token_counts=counts, penalty_overlay=overlay, prompt_ids=prompt)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-30)
