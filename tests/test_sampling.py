"""The law of mtplx against its specification, on the reference and, where it can, on the MLX twin.

The oracle below is a second writing of the law in plain Python: loops, ``math.fsum``, fractions.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import mtplx.sampling as sampling
from mtplx.errors import MtplxError
from mtplx.fast_sampling import sparse_distribution_from_mlx_logits
from mtplx.sampling import (
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
    acceptance_probability,
    apply_penalties,
    apply_top_k_top_p,
    apply_top_p_top_k,
    deterministic_top_k_order,
    distribution_from_logits,
    residual_distribution,
    sample_from_distribution,
    softmax,
    speculative_output_marginal,
    verify_one_token,
)

INF = float("inf")
NAN = float("nan")
NEUTRAL = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0)
PATHS = ("numpy", "mlx")
FORMS = ("dense", "sparse", "mlx")


def checked(examples: int):
    return settings(max_examples=examples, deadline=None, derandomize=True)


# --- helpers ----------------------------------------------------------------------------------


def dense(law) -> np.ndarray:
    return law.to_dense() if isinstance(law, SparseDistribution) else np.asarray(law)


def build(path: str, logits, config: SamplerConfig, **history) -> np.ndarray:
    """p of one row, dense, by the reference or by the twin."""
    if path == "numpy":
        return distribution_from_logits(np.asarray(logits, np.float32), config, **history)
    row = mx.array(np.asarray(logits, np.float32))
    return sparse_distribution_from_mlx_logits(row, config, **history).to_dense()


def law(form: str, probs):
    """A distribution with these probabilities; through float32 logits for the twin."""
    probs = np.asarray(probs, dtype=np.float64)
    if form == "dense":
        return probs / probs.sum()
    if form == "sparse":
        ids = np.flatnonzero(probs)
        return SparseDistribution(ids, probs[ids], probs.size)
    with np.errstate(divide="ignore"):
        logits = np.log(probs).astype(np.float32)
    return sparse_distribution_from_mlx_logits(mx.array(logits), NEUTRAL)


class Uniforms:
    """Stands in for a generator: gives the uniforms it was made with, in order."""

    def __init__(self, *values: float):
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


# --- the oracle -------------------------------------------------------------------------------


def oracle_logits(logits, config, counts, overlay, prompt):
    row = [float(x) for x in logits]
    for token, amount in (config.logit_bias or {}).items():
        row[token] += amount
    output = {t for t, n in (counts or {}).items() if n > 0}
    for token in output | set(prompt or ()):
        penalty = config.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, n in (counts or {}).items():
        presence = min(2.0, max(-2.0, config.presence_penalty))
        frequency = min(2.0, max(-2.0, config.frequency_penalty))
        row[token] -= frequency * n + (presence if n > 0 else 0.0)
    for token, amount in (overlay or {}).items():
        row[token] -= amount
    return row


def oracle(logits, config, counts=None, overlay=None, prompt=None):
    """(probabilities, margin): margin is how near a filter came to deciding otherwise."""
    row = oracle_logits(logits, config, counts, overlay, prompt)
    top = max(row)
    if config.temperature <= 0:
        return [1.0 if i == row.index(top) else 0.0 for i in range(len(row))], INF
    weights = [math.exp((x - top) / config.temperature) for x in row]
    total = math.fsum(weights)
    probs = [w / total for w in weights]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    highest, margin, kept = probs[order[0]], INF, []
    for rank, token in enumerate(order):
        before = math.fsum(probs[t] for t in order[:rank])
        if rank and config.top_p < 1.0:
            margin = min(margin, abs(before - config.top_p))
        if rank and config.min_p > 0.0 and probs[token] > 0.0:
            margin = min(margin, abs(probs[token] - config.min_p * highest) / highest)
        in_p = rank == 0 or config.top_p == 1.0 or before < config.top_p
        in_k = config.top_k == 0 or rank < config.top_k
        if in_p and in_k and probs[token] >= config.min_p * highest:
            kept.append(token)
    mass = math.fsum(probs[t] for t in kept)
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(row))], margin


f32 = st.floats(-60, 60, width=32)
rows = st.lists(f32, min_size=1, max_size=24)
configs = st.builds(
    SamplerConfig,
    temperature=st.sampled_from([0.0, -1.0, 0.3, 0.6, 1.0, 1.7, 5.0]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    top_k=st.integers(0, 30),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0, 3.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5, -7.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
)


@st.composite
def cases(draw):
    row = draw(rows)
    token = st.integers(0, len(row) - 1)
    return (
        row,
        draw(configs),
        draw(st.dictionaries(token, st.integers(0, 4), max_size=4)),
        draw(st.dictionaries(token, st.floats(-3, 3), max_size=3)),
        draw(st.lists(token, max_size=4)),
    )


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


# --- SamplerConfig ----------------------------------------------------------------------------


def test_config_defaults_order_and_frozen():
    fields = [f.name for f in dataclasses.fields(SamplerConfig)]
    assert fields[:5] == [
        "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty",
    ]  # fmt: skip
    config = SamplerConfig()
    assert (config.temperature, config.top_p, config.top_k) == (0.6, 0.95, 20)
    assert (config.presence_penalty, config.frequency_penalty, config.min_p) == (0.0, 0.0, 0.0)
    assert config.repetition_penalty == 1.0
    assert config.logit_bias is None
    assert SamplerConfig(0.5, 0.9, 3, 0.1, 0.2) == SamplerConfig(
        temperature=0.5, top_p=0.9, top_k=3, presence_penalty=0.1, frequency_penalty=0.2
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, bad) for name in (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty",
    ) for bad in (NAN, INF, -INF, True, False, np.True_, "1", None, 1j, 10**400, [1.0])]
    + [("top_k", bad) for bad in (-1, True, np.True_, 1.0, NAN, "3", None)]
    + [("top_p", bad) for bad in (0.0, -0.1, 1.0000001, 2)]
    + [("min_p", bad) for bad in (-0.1, 1.1)]
    + [("repetition_penalty", bad) for bad in (0, 0.0, -1.0)]
    + [("logit_bias", bad) for bad in (
        [1.0], "a", 3, {1: NAN}, {1: INF}, {-1: 1.0}, {True: 1.0}, {1.0: 1.0}, {"1": 1.0},
        {1: "a"}, {1: True}, {1: None}, {1: 10**400},
    )],
)  # fmt: skip
def test_config_refuses_and_names_the_field(name, value):
    with pytest.raises(ValueError, match=name):
        SamplerConfig(**{name: value})


@pytest.mark.parametrize("temperature", [0, -1, -1e300, 1e-38, 5e-324, 1e300, np.float32(0.5)])
def test_config_takes_any_finite_temperature(temperature):
    assert SamplerConfig(temperature=temperature).temperature == float(temperature)


def test_config_takes_penalties_beyond_the_clamp():
    config = SamplerConfig(presence_penalty=1e9, frequency_penalty=-1e9, top_p=1, min_p=1)
    assert config.presence_penalty == 1e9
    assert config.frequency_penalty == -1e9


def test_config_owns_its_bias():
    bias = {3: 1.5, 4: -INF}
    config = SamplerConfig(logit_bias=bias)
    bias[3] = 9.0
    assert dict(config.logit_bias) == {3: 1.5, 4: -INF}
    assert dataclasses.asdict(config)["logit_bias"] == {3: 1.5, 4: -INF}
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config
        assert hash(other) == hash(config)
    assert dataclasses.replace(config, top_k=4).logit_bias == config.logit_bias
    assert config != SamplerConfig()


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


@st.composite
def dyadic(draw):
    """Integer weights that add up to a power of two: every sum below is exact in float64."""
    weights = draw(st.lists(st.integers(0, 64), min_size=1, max_size=20))
    total = 1 << max(sum(weights), 1).bit_length()
    weights[draw(st.integers(0, len(weights) - 1))] += total - sum(weights)
    return weights, total, draw(st.integers(1, total)), draw(st.integers(0, 22))


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


# --- SparseDistribution -----------------------------------------------------------------------


def test_sparse_distribution_normalises_and_answers():
    law = SparseDistribution(np.array([7, 2]), np.array([3.0, 1.0]), 9)
    assert law.probability(7) == 0.75
    assert law.probability(2) == 0.25
    assert law.probability(3) == 0.0
    np.testing.assert_array_equal(law.to_dense(), [0, 0, 0.25, 0, 0, 0, 0, 0.75, 0])
    assert SparseDistribution.one_hot(4, 5).to_dense().tolist() == [0, 0, 0, 0, 1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        law.vocab_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([], []),
        ([0, 1], [1.0]),
        ([[0, 1]], [[0.5, 0.5]]),
        (0, 1.0),
        ([0, 1], [1.5, -0.5]),
        ([0, 1], [1.0, -INF]),
        ([0, 5], [0.5, 0.5]),
        ([-1, 1], [0.5, 0.5]),
        ([1, 1], [0.5, 0.5]),
    ],
)
def test_sparse_distribution_refuses(ids, probs):
    with pytest.raises(ValueError):  # noqa: PT011
        SparseDistribution(np.array(ids), np.array(probs), 5)


@pytest.mark.parametrize("probs", [[0.0, 0.0], [NAN, 0.0], [NAN, NAN]])
def test_sparse_distribution_without_mass(probs):
    with pytest.raises(NonFiniteLogitsError):
        SparseDistribution(np.array([0, 1]), np.array(probs), 5)


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


weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.sampled_from([1e-300, 1.0, 0.5])),
    min_size=1, max_size=12,
)  # fmt: skip


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
