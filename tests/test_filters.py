"""softmax, order, filters and penalties of the reference."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from law_oracle import INF, NAN, NEUTRAL, PATHS, build, checked, dyadic, rows

from mtplx.sampling import (
    NonFiniteLogitsError,
    SamplerConfig,
    apply_penalties,
    apply_top_k_top_p,
    apply_top_p_top_k,
    deterministic_top_k_order,
    distribution_from_logits,
    softmax,
)

# --- softmax ----------------------------------------------------------------------------------


def test_softmax_known_values():
    np.testing.assert_allclose(softmax([0.0, math.log(3.0)]), [0.25, 0.75], rtol=1e-15)
    np.testing.assert_allclose(softmax([0.0, math.log(3.0)], 0.5), [0.1, 0.9], rtol=1e-15)
    np.testing.assert_array_equal(softmax([-INF, 2.0, -INF]), [0, 1, 0])


@pytest.mark.parametrize("temperature", [0, -0.0, -3.5])
def test_softmax_is_one_hot_at_the_first_argmax(temperature):
    np.testing.assert_array_equal(softmax([1.0, 5.0, 5.0, 2.0], temperature), [0, 1, 0, 0])
    np.testing.assert_array_equal(softmax([-0.0, 0.0], temperature), [1, 0])


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 1.0, 1e30, 1e300])
def test_softmax_does_not_overflow(temperature, recwarn):
    for row in ([1e30, -1e30, 0.0], [1e308, -1e308, 1e308], [-INF, -1e30, -1e30], [7.0]):
        probs = softmax(row, temperature)
        assert np.isfinite(probs).all()
        assert math.isclose(probs.sum(), 1.0, rel_tol=1e-12)
    assert not recwarn.list


def test_softmax_refuses_shapes_and_temperatures():
    for bad in ([], [[1.0, 2.0]], 3.0):
        with pytest.raises(ValueError, match="logits"):
            softmax(bad)
    for temperature in (NAN, INF):
        with pytest.raises(ValueError, match="temperature"):
            softmax([1.0, -INF], temperature)


# --- deterministic_top_k_order ----------------------------------------------------------------


def test_top_k_order_is_value_descending_then_id_ascending():
    assert deterministic_top_k_order([1.0, 3.0, 3.0, 0.0, 3.0], 2).tolist() == [1, 2]
    assert deterministic_top_k_order([0.0, -0.0, 0.0], 2).tolist() == [0, 1]
    assert deterministic_top_k_order([-INF, 1.0, -INF], 3).tolist() == [1, 0, 2]
    assert deterministic_top_k_order([NAN, 1.0, INF], 2).tolist() == [2, 1]


@pytest.mark.parametrize(("top_k", "count"), [(-3, 0), (0, 0), (1, 1), (4, 4), (5, 4), (10**9, 4)])
def test_top_k_order_clamps(top_k, count):
    found = deterministic_top_k_order([1.0, 2.0, 3.0, 4.0], top_k)
    assert found.tolist() == [3, 2, 1, 0][:count]
    assert found.dtype == np.int64


@pytest.mark.parametrize("bad", [3.0, [[1.0, 2.0]], np.zeros((2, 2, 2))])
def test_top_k_order_refuses_other_than_one_dimension(bad):
    with pytest.raises(ValueError, match="1-D"):
        deterministic_top_k_order(bad, 1)


@checked(300)
@given(
    st.lists(st.sampled_from([-INF, -1.5, -0.0, 0.0, 1.0, 2.0]), max_size=40), st.integers(-2, 45)
)
def test_top_k_order_is_a_stable_sort(values, top_k):
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[: max(top_k, 0)]
    assert deterministic_top_k_order(np.array(values, float), top_k).tolist() == expected


# --- apply_top_p_top_k ------------------------------------------------------------------------


def test_top_p_keeps_the_crossing_token_and_nothing_after_an_exact_hit():
    probs = [0.5, 0.25, 0.125, 0.125]
    np.testing.assert_allclose(apply_top_p_top_k(probs, 0.6), [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(apply_top_p_top_k(probs, 0.75), [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(apply_top_p_top_k(probs, 0.5), [1, 0, 0, 0])
    np.testing.assert_allclose(apply_top_p_top_k(probs, 1e-9), [1, 0, 0, 0])


def test_nucleus_mass_is_taken_on_the_full_vocabulary_not_on_the_top_k():
    probs = [0.3, 0.2, 0.2, 0.3]
    # Renormalised to the two highest first, top_p = 0.5 would keep one token.
    np.testing.assert_allclose(apply_top_p_top_k(probs, 0.5, 2), [0.5, 0, 0, 0.5])
    np.testing.assert_allclose(apply_top_p_top_k(probs, 0.3, 2), [1, 0, 0, 0])


def test_ties_at_the_cut_off_keep_the_lower_ids():
    probs = [0.2, 0.2, 0.2, 0.2, 0.2]
    assert np.flatnonzero(apply_top_p_top_k(probs, 1.0, 2)).tolist() == [0, 1]
    assert np.flatnonzero(apply_top_p_top_k(probs, 0.5)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 10**9])
@pytest.mark.parametrize("top_p", [0.0, -1.0, 1.0, 1.5, INF])
def test_the_bare_filter_is_off_outside_its_range(top_p, top_k):
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    np.testing.assert_array_equal(apply_top_p_top_k(probs, top_p, top_k), probs)


def test_the_bare_filter_refuses_what_is_no_distribution():
    for bad in ([[0.5, 0.5]], [], [-0.5, 1.5]):
        with pytest.raises(ValueError, match="probs"):
            apply_top_p_top_k(bad, 0.9, 1)
    for bad in ([0.0, 0.0], [NAN, 1.0], [INF, 1.0]):
        with pytest.raises(NonFiniteLogitsError):
            apply_top_p_top_k(bad, 0.9, 1)


def test_the_alias_has_its_arguments_the_other_way_round():
    probs = [0.4, 0.3, 0.2, 0.1]
    np.testing.assert_array_equal(
        apply_top_k_top_p(probs, 3, 0.5), apply_top_p_top_k(probs, 0.5, 3)
    )
    np.testing.assert_array_equal(
        apply_top_k_top_p(probs, top_k=1), apply_top_p_top_k(probs, top_k=1)
    )
    np.testing.assert_array_equal(apply_top_k_top_p([0.75, 0.25]), [0.75, 0.25])


@checked(400)
@given(dyadic())
def test_the_filters_by_fractions(case):
    weights, total, threshold, top_k = case
    probs = np.array(weights) / total
    got = apply_top_p_top_k(probs, threshold / total, top_k)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    top_p, p = Fraction(threshold, total), [Fraction(w, total) for w in weights]
    nucleus = [t for r, t in enumerate(order) if sum((p[i] for i in order[:r]), Fraction()) < top_p]
    # minimal: without its last token the nucleus falls short; with it, it does not
    assert sum(p[t] for t in nucleus) >= top_p > sum(p[t] for t in nucleus[:-1])
    kept = [t for t in nucleus if top_k == 0 or t in order[:top_k]]
    mass = sum(p[t] for t in kept)
    assert kept[0] == order[0]
    assert math.isclose(got.sum(), 1.0, rel_tol=1e-12)
    for token, value in enumerate(got):
        exact = p[token] / mass if token in kept else Fraction()
        assert abs(value - float(exact)) <= 2e-16


@checked(200)
@given(
    rows,
    st.floats(0.001, 1.0),
    st.integers(0, 30),
    st.floats(0.0, 1.0),
    st.sampled_from(PATHS),
)
def test_support_rules(row, top_p, top_k, min_p, path):
    """Intersection, counts and never empty: judged from the single filters alone."""

    def support(**parameters):
        config = SamplerConfig(**{"temperature": 0.8, "top_p": 1.0, "top_k": 0, **parameters})
        return set(np.flatnonzero(build(path, row, config)).tolist())

    everything = support(top_p=top_p, top_k=top_k, min_p=min_p)
    single = support(top_p=top_p), support(top_k=top_k), support(min_p=min_p)
    assert everything == set.intersection(*single)
    assert int(np.argmax(row)) in everything
    if 0 < top_k < len(row):
        assert len(single[1]) <= top_k
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        assert single[1] == set(order[:top_k]) & support()
    probs = softmax(np.array(row), 0.8)
    for token in range(len(row)):
        if abs(probs[token] - min_p * probs.max()) > 1e-9:
            assert (token in single[2]) == (probs[token] >= min_p * probs.max())


@pytest.mark.parametrize("path", PATHS)
def test_min_p_of_one_keeps_the_ties_of_the_highest(path):
    config = SamplerConfig(temperature=0.7, top_p=1.0, top_k=0, min_p=1.0)
    np.testing.assert_array_equal(build(path, [2.0, 1.0, 2.0], config), [0.5, 0, 0.5])


# --- penalties --------------------------------------------------------------------------------


def test_penalties_by_hand():
    logits = np.array([1.0, 2.0, 3.0, 4.0])
    got = apply_penalties(logits, {0: 3, 1: 1, 2: 0}, 0.5, 0.25)
    np.testing.assert_array_equal(got, [1 - 0.75 - 0.5, 2 - 0.25 - 0.5, 3.0, 4.0])
    np.testing.assert_array_equal(logits, [1.0, 2.0, 3.0, 4.0])


def test_the_coefficients_are_clamped_not_the_product():
    got = apply_penalties(np.zeros(2), {0: 10}, 5.0, 7.0)
    np.testing.assert_array_equal(got, [-(2.0 + 2.0 * 10), 0])
    got = apply_penalties(np.zeros(2), {0: 10}, -5.0, -7.0)
    np.testing.assert_array_equal(got, [2.0 + 2.0 * 10, 0])


def test_the_overlay_is_subtracted_unclamped_and_added_to_the_rest():
    got = apply_penalties(np.zeros(3), {0: 1}, 1.0, 0.0, {0: 10.0, 2: -4.5})
    np.testing.assert_array_equal(got, [-11.0, 0.0, 4.5])
    got = apply_penalties(np.zeros(3), None, penalty_overlay={1: INF})
    np.testing.assert_array_equal(got, [0.0, -INF, 0.0])


@pytest.mark.parametrize(
    "arguments",
    [(None,), ({},), ({0: 3},), ({0: 3}, 0.0, 0.0, {}), (None, 1.0, 1.0), ({}, 1.0, 1.0, None)],
)
def test_inactive_penalties_return_the_same_object(arguments):
    for logits in (np.array([1.0, 2.0]), [1.0, 2.0]):
        assert apply_penalties(logits, *arguments) is logits


def test_ids_outside_the_vocabulary_are_refused():
    repeating = SamplerConfig(repetition_penalty=1.1)
    for bad in (-1, 2, 10**9):
        with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
            apply_penalties([1.0, 2.0], {bad: 1}, 1.0)
        with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
            apply_penalties([1.0, 2.0], None, penalty_overlay={bad: 1.0})
        with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
            distribution_from_logits([1.0, 2.0], SamplerConfig(logit_bias={abs(bad) + 1: 1.0}))
        with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
            distribution_from_logits([1.0, 2.0], repeating, prompt_ids=[bad])


@pytest.mark.parametrize("path", PATHS)
def test_repetition_penalty_sees_prompt_and_output_once(path):
    config = dataclasses.replace(NEUTRAL, repetition_penalty=2.0)
    logits = [2.0, -1.0, 0.0, 3.0]
    got = build(path, logits, config, token_counts={0: 5, 2: 1, 3: 0}, prompt_ids=[0, 1, 1])
    np.testing.assert_allclose(got, softmax([1.0, -2.0, 0.0, 3.0]), rtol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_presence_and_frequency_do_not_see_the_prompt(path):
    config = dataclasses.replace(NEUTRAL, presence_penalty=1.0, frequency_penalty=1.0)
    got = build(path, [1.0, 2.0], config, token_counts={0: 2}, prompt_ids=[0, 1])
    np.testing.assert_allclose(got, softmax([1.0 - 2 - 1, 2.0]), rtol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_order_bias_then_repetition_then_presence_then_temperature(path):
    config = SamplerConfig(
        temperature=0.5, top_p=1.0, top_k=0, presence_penalty=0.5, repetition_penalty=2.0,
        logit_bias={0: 3.0},
    )  # fmt: skip
    # The bias makes the logit positive, so the repetition penalty divides; then presence.
    got = build(path, [-1.0, 0.25], config, token_counts={0: 1})
    np.testing.assert_allclose(got, softmax([(-1 + 3) / 2 - 0.5, 0.25], 0.5), rtol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_filters_come_after_temperature(path):
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    config = SamplerConfig(temperature=0.25, top_p=0.75, top_k=0)
    # At T = 0.25 the first token alone has 0.72; filtered before, three tokens would stay.
    assert np.flatnonzero(build(path, logits, config)).tolist() == [0, 1]
    hot = SamplerConfig(temperature=4.0, top_p=0.75, top_k=0)
    assert np.flatnonzero(build(path, logits, hot)).tolist() == [0, 1, 2]
    assert np.flatnonzero(build(path, logits, dataclasses.replace(hot, temperature=1.0))).size == 3


@checked(200)
@given(rows, st.sampled_from([0.3, 1.0, 2.5]))
def test_neutral_parameters_are_exact_no_ops(row, temperature):
    plain = softmax(row, temperature)
    neutral = SamplerConfig(temperature=temperature, top_p=1.0, top_k=0)
    same = [
        distribution_from_logits(row, neutral),
        distribution_from_logits(row, dataclasses.replace(neutral, top_k=len(row))),
        distribution_from_logits(row, dataclasses.replace(neutral, top_k=10**9, logit_bias={})),
        distribution_from_logits(row, dataclasses.replace(neutral, logit_bias={0: 0.0})),
        distribution_from_logits(
            row, neutral, token_counts={0: 7}, prompt_ids=[0, 0], penalty_overlay={0: 0.0}
        ),
        distribution_from_logits(
            row,
            dataclasses.replace(neutral, presence_penalty=1.0, repetition_penalty=2.0),
            token_counts={0: 0},
            prompt_ids=[],
        ),
    ]
    for got in same:
        np.testing.assert_array_equal(got, plain)
