"""The law of mtplx against its specification, on the reference and, where it can, on the MLX twin.

The oracle below is a second writing of the law in plain Python: loops, ``math.fsum``, fractions."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from law_oracle import (
    FORMS,
    INF,
    NAN,
    NEUTRAL,
    PATHS,
    Uniforms,
    build,
    checked,
    configs,
    dense,
    dyadic,
    f32,
    law,
    oracle,
    rows,
    weights,
)

import mtplx.sampling as sampling
from mtplx.errors import MtplxError
from mtplx.fast_sampling import sparse_distribution_from_mlx_logits
from mtplx.sampling import (
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
    acceptance_probability,
    apply_top_p_top_k,
    distribution_from_logits,
    residual_distribution,
    speculative_output_marginal,
    verify_one_token,
)

# --- distribution_from_logits -----------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_distribution_from_logits_normalizes_after_filtering(path):
    config = SamplerConfig(temperature=1.0, top_p=0.9, top_k=2)
    got = build(path, np.log([0.5, 0.3, 0.15, 0.05]), config)
    np.testing.assert_allclose(got, [0.625, 0.375, 0.0, 0.0], rtol=1e-6)
    assert math.isclose(got.sum(), 1.0, rel_tol=1e-12)
    assert np.count_nonzero(got) == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-38, 0.6, 1.0, 1e30])
@pytest.mark.parametrize(
    ("row", "nan", "inf"),
    [
        ([1.0, NAN, 2.0, NAN], 2, 0),
        ([INF, 1.0, 0.0, 0.0], 0, 1),
        ([INF, NAN, INF, 0.0], 1, 2),
        ([-INF, -INF, -INF, -INF], None, None),
        ([NAN, -INF, -INF, -INF], 1, 0),
    ],
)
@pytest.mark.parametrize("filters", [{}, {"top_p": 1.0, "top_k": 0}, {"top_k": 0, "min_p": 0.1}])
def test_rows_without_a_law_raise_at_every_temperature(path, temperature, row, nan, inf, filters):
    config = SamplerConfig(temperature=temperature, **filters)
    with pytest.raises(NonFiniteLogitsError, match=r"\d") as caught:
        build(path, row, config)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, MtplxError)
    assert caught.value.vocab_size == 4
    if nan is not None:
        assert (caught.value.nan_count, caught.value.inf_count) == (nan, inf)


def test_the_error_can_be_built_bare():
    error = NonFiniteLogitsError("x")
    assert (error.nan_count, error.inf_count, error.vocab_size) == (None, None, None)
    assert str(error) == "x"
    with pytest.raises(TypeError):
        NonFiniteLogitsError("x", 1)  # type: ignore[misc]


@pytest.mark.parametrize("path", PATHS)
def test_a_bias_that_bans_everything_raises(path):
    config = dataclasses.replace(NEUTRAL, logit_bias={0: -INF, 1: -INF})
    with pytest.raises(NonFiniteLogitsError):
        build(path, [1.0, 2.0], config)
    np.testing.assert_array_equal(build(path, [1.0, 2.0, 0.0], config), [0, 0, 1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.6, 1.0, 1e30, 1e35])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 1.0])
@pytest.mark.parametrize(
    "row",
    [
        [1e30, -1e30, 0.0, 1e30, -INF],
        [-INF, -INF, 3.0, -INF, -INF],
        [-1e30] * 4 + [-INF],
        [0.0, -0.0, 0.0, -0.0, -INF],
        [1e-30, 2e-30, 3e-30, 4e-30, 5e-30],
        [3.0] * 70,
    ],
)
def test_extremes(path, temperature, top_p, row, recwarn):
    row32 = [float(np.float32(x)) for x in row]
    for top_k in (0, 1, 5, 70, 10**6):
        config = SamplerConfig(temperature=temperature, top_p=top_p, top_k=top_k)
        expected, margin = oracle(row32, config)
        got = build(path, row32, config)
        assert math.isclose(got.sum(), 1.0, rel_tol=1e-12)
        if margin > 2e-6:
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-300)
    assert not [w for w in recwarn.list if issubclass(w.category, RuntimeWarning)]


def test_sparse_support_never_empty_even_when_min_p_and_top_k_and_top_p_all_bite():
    config = SamplerConfig(temperature=1.0, top_p=1e-9, top_k=1, min_p=1.0)
    np.testing.assert_array_equal(distribution_from_logits([1.0, 1.0, 1.0], config), [1, 0, 0])


def test_inputs_are_never_changed():
    logits = np.array([1.0, 2.0, 3.0, 4.0])
    logits.flags.writeable = False
    config = SamplerConfig(logit_bias={0: 1.0}, repetition_penalty=1.5, presence_penalty=1.0)
    distribution_from_logits(logits, config, token_counts={1: 2}, prompt_ids=[2])
    p = np.array([0.5, 0.5, 0.0])
    p.flags.writeable = False
    apply_top_p_top_k(p, 0.9, 1)
    residual_distribution(p, np.array([0.1, 0.1, 0.8]))
    speculative_output_marginal(p, np.array([0.1, 0.1, 0.8]))


# --- acceptance -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_acceptance_probability_caps_at_one(form):
    p, q = law(form, [0.75, 0.25]), law(form, [0.25, 0.75])
    assert acceptance_probability(p, q, 0) == 1.0
    assert math.isclose(acceptance_probability(p, q, 1), 1 / 3, rel_tol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_acceptance_probability_where_q_is_zero(form):
    p, q = law(form, [0.5, 0.5, 0.0, 0.0]), law(form, [0.0, 0.5, 0.5, 0.0])
    assert acceptance_probability(p, q, 0) == 1.0
    assert acceptance_probability(p, q, 1) == 1.0
    assert acceptance_probability(p, q, 2) == 0.0
    assert acceptance_probability(p, q, 3) == 0.0


def test_acceptance_probability_of_denormals_does_not_overflow():
    p, q = np.array([1.0, 1e-300]), np.array([1.0, 5e-324])
    assert acceptance_probability(p, q, 1) == 1.0
    assert acceptance_probability(q, p, 1) == 5e-324 / 1e-300


@pytest.mark.parametrize("form", FORMS)
def test_probability_lookup_in_either_form(form):
    found = law(form, [0.25, 0.0, 0.75])
    assert math.isclose(sampling._probability(found, 2), 0.75, rel_tol=1e-6)
    assert sampling._probability(found, 1) == 0.0
    for outside in (-1, 3):
        with pytest.raises(ValueError, match="outside"):
            sampling._probability(found, outside)


def test_vocabularies_that_differ_are_refused():
    p, q = np.array([0.5, 0.5]), np.array([0.2, 0.3, 0.5])
    one = SparseDistribution.one_hot(1, 3)
    for a, b in ((p, q), (p, one), (one, p)):
        for function in (residual_distribution, speculative_output_marginal):
            with pytest.raises(ValueError, match="tokens"):
                function(a, b)
        with pytest.raises(ValueError, match="tokens"):
            verify_one_token(a, b, 0, Uniforms(0.5))


# --- residual ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_residual_distribution_is_the_normalised_positive_part(form):
    p, q = law(form, [0.5, 0.25, 0.25, 0.0]), law(form, [0.25, 0.5, 0.0, 0.25])
    residual = residual_distribution(p, q)
    assert isinstance(residual, SparseDistribution) == (form != "dense")
    np.testing.assert_allclose(dense(residual), [0.5, 0.0, 0.5, 0.0], atol=1e-6)
    assert dense(residual)[1] == 0.0
    assert dense(residual)[3] == 0.0


def test_residual_distribution_of_mixed_forms_is_dense():
    p, q = law("dense", [0.5, 0.5]), law("sparse", [0.0, 1.0])
    for a, b, expected in ((p, q, [1, 0]), (q, p, [0, 1])):
        residual = residual_distribution(a, b)
        assert isinstance(residual, np.ndarray)
        np.testing.assert_array_equal(residual, expected)


@pytest.mark.parametrize("form", FORMS)
def test_residual_distribution_without_mass_is_the_target(form):
    p = law(form, [0.5, 0.25, 0.25])
    np.testing.assert_array_equal(dense(residual_distribution(p, p)), dense(p))


def test_residual_distribution_nan_mass_falls_back_to_target():
    target = np.array([0.25, 0.75])
    np.testing.assert_array_equal(residual_distribution(target, np.array([NAN, NAN])), target)
    # A NaN term counts as 0, the others keep their mass.
    np.testing.assert_array_equal(residual_distribution(target, np.array([NAN, 0.5])), [0.0, 1.0])
    np.testing.assert_array_equal(
        residual_distribution(np.array([NAN, 0.5]), np.array([0.5, 0.5])), [0.0, 1.0]
    )


def test_residual_distribution_nan_in_a_sparse_look_up():
    p = SparseDistribution(np.array([1, 2]), np.array([0.25, 0.75]), 5)
    q = SparseDistribution(np.array([1, 2]), np.array([0.75, 0.25]), 5)
    object.__setattr__(q, "probs", np.array([NAN, 0.25]))
    residual = residual_distribution(p, q)
    assert isinstance(residual, SparseDistribution)
    np.testing.assert_array_equal(residual.to_dense(), [0, 0, 1, 0, 0])
    object.__setattr__(q, "probs", np.array([NAN, NAN]))
    np.testing.assert_array_equal(residual_distribution(p, q).to_dense(), p.to_dense())


@pytest.mark.parametrize("bad", [[], [0.0, 0.0], [NAN, NAN], [NAN, 0.0]])
def test_residual_distribution_of_an_empty_target(bad):
    with pytest.raises(ValueError):  # noqa: PT011
        residual_distribution(np.array(bad), np.full(len(bad), 0.5))


def test_residual_distribution_keeps_tiny_mass_without_an_epsilon():
    p, q = np.array([1.0, 1e-300, 0.0]), np.array([1.0, 0.0, 0.0])
    np.testing.assert_array_equal(residual_distribution(p, q), [0.0, 1.0, 0.0])


@checked(300)
@given(dyadic(), st.lists(st.integers(0, 64), min_size=20, max_size=20))
def test_residual_distribution_by_fractions(case, other):
    weights, total, _, _ = case
    other = other[: len(weights)]
    other[0] += total - sum(other)
    assume(other[0] >= 0)
    p, q = np.array(weights) / total, np.array(other) / total
    excess = [max(a - b, 0) for a, b in zip(weights, other, strict=True)]
    exact = excess if sum(excess) else weights
    expected = [Fraction(e, sum(exact)) for e in exact]
    for residual in (
        residual_distribution(p, q),
        residual_distribution(law("sparse", p), law("sparse", q)),
    ):
        assert (
            max(abs(a - float(b)) for a, b in zip(dense(residual), expected, strict=True)) < 1e-15
        )


# --- marginal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_speculative_output_marginal_recovers_target_distribution(form):
    p, q = law(form, [0.55, 0.25, 0.15, 0.05]), law(form, [0.1, 0.55, 0.2, 0.15])
    np.testing.assert_allclose(speculative_output_marginal(p, q), dense(p), atol=1e-12)


@checked(400)
@given(weights, weights, st.sampled_from(["dense", "sparse"]), st.sampled_from(["dense", "sparse"]))
@example([1.0, 0.0], [0.0, 1.0], "dense", "sparse")
@example([0.5, 0.5], [0.5, 0.5], "sparse", "sparse")
def test_marginal_is_the_target(p_weights, q_weights, p_form, q_form):
    size = min(len(p_weights), len(q_weights))
    p_weights, q_weights = p_weights[:size], q_weights[:size]
    assume(sum(p_weights) > 0 and sum(q_weights) > 0)
    p, q = law(p_form, p_weights), law(q_form, q_weights)
    np.testing.assert_allclose(speculative_output_marginal(p, q), dense(p), rtol=0, atol=1e-12)


@checked(150)
@given(st.data(), rows, configs, configs)
def test_marginal_is_the_target_for_laws_built_by_the_twin(data, row, p_config, q_config):
    other = data.draw(st.lists(f32, min_size=len(row), max_size=len(row)))
    p = sparse_distribution_from_mlx_logits(mx.array(row, mx.float32), p_config)
    q = sparse_distribution_from_mlx_logits(mx.array(other, mx.float32), q_config)
    np.testing.assert_allclose(speculative_output_marginal(p, q), p.to_dense(), rtol=0, atol=1e-12)


@checked(200)
@given(weights, weights)
def test_marginal_by_the_parts_it_is_made_of(p_weights, q_weights):
    """sum_x q(x) (a(x) 1_x + (1 - a(x)) r), written out over tokens from the public functions."""
    size = min(len(p_weights), len(q_weights))
    assume(sum(p_weights[:size]) > 0 and sum(q_weights[:size]) > 0)
    p, q = law("dense", p_weights[:size]), law("dense", q_weights[:size])
    residual = residual_distribution(p, q)
    for v in range(size):
        kept = q[v] * acceptance_probability(p, q, v)
        lost = math.fsum(q[x] * (1 - acceptance_probability(p, q, x)) for x in range(size))
        assert abs(kept + lost * residual[v] - p[v]) < 1e-12


# --- the module -------------------------------------------------------------------------------


def test_the_public_names():
    assert set(sampling.__all__) >= {
        "NonFiniteLogitsError", "SamplerConfig", "SparseDistribution", "SpeculativeDecision",
        "acceptance_probability", "apply_penalties", "apply_top_k_top_p", "apply_top_p_top_k",
        "deterministic_top_k_order", "distribution_from_logits", "residual_distribution",
        "sample_from_distribution", "softmax", "speculative_output_marginal", "verify_one_token",
    }  # fmt: skip
    for name in sampling.__all__:
        assert getattr(sampling, name).__doc__ or name == "Distribution", name


def test_the_reference_prints_no_warning_on_import():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import mtplx.sampling"], capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
