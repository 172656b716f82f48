"""Penalties and errors of the twin."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from test_fast_sampling import DTYPES, INF, NAN, host, random_logits

import mtplx.fast_sampling as fast
from mtplx.fast_sampling import (
    apply_penalties_mlx,
    sample_token_ids_from_mlx_logits,
    sparse_distribution_from_mlx_logits,
    sparse_distributions_from_mlx_logits,
)
from mtplx.sampling import (
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
    apply_penalties,
)

# --- penalties on the device ------------------------------------------------------------------


def test_penalties_equal_the_reference():
    logits = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    for arguments in (
        ({0: 3, 1: 1, 2: 0}, 0.5, 0.25),
        ({0: 10}, 5.0, -7.0),
        ({0: 1}, 1.0, 0.0, {0: 10.0, 2: -4.5}),
        (None, 0.0, 0.0, {3: INF}),
    ):
        got = apply_penalties_mlx(mx.array(logits), *arguments)
        assert got.dtype == mx.float32
        np.testing.assert_array_equal(np.array(got), apply_penalties(logits, *arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inactive_penalties_return_the_same_object(dtype):
    logits = mx.array([1.0, 2.0]).astype(DTYPES[dtype])
    for arguments in ((None,), ({},), ({0: 3},), ({0: 3}, 0.0, 0.0, {}), (None, 1.0, 1.0)):
        assert apply_penalties_mlx(logits, *arguments) is logits


def test_penalties_on_rows_that_share_one_history():
    logits = mx.array([[1.0, 2.0, 3.0]])
    got = apply_penalties_mlx(logits, {2: 1}, 1.0)
    assert got.tolist() == [[1.0, 2.0, 2.0]]


def test_a_huge_finite_amount_stays_finite(recwarn):
    config = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0, logit_bias={1: 1e300})
    law = sparse_distribution_from_mlx_logits(mx.array([1.0, 2.0, 3.0]), config)
    assert law.token_ids.tolist() == [1]
    config = dataclasses.replace(config, logit_bias={0: -1e300, 1: -INF})
    law = sparse_distribution_from_mlx_logits(mx.array([1.0, 2.0, 3.0]), config)
    assert law.token_ids.tolist() == [2]
    assert not recwarn.list


@pytest.mark.parametrize("bad", [-1, 8, 2**31, 2**40])
def test_ids_outside_the_vocabulary_never_reach_the_device(bad):
    logits = mx.zeros((2, 8))
    config = SamplerConfig(presence_penalty=1.0, repetition_penalty=1.2)
    plain = SamplerConfig()
    calls = [
        lambda: sparse_distributions_from_mlx_logits(logits, config, token_counts=[None, {bad: 1}]),
        lambda: sparse_distributions_from_mlx_logits(logits, config, prompt_ids=[1, bad]),
        lambda: sparse_distributions_from_mlx_logits(logits, plain, penalty_overlay={bad: 1.0}),
        lambda: apply_penalties_mlx(logits[0], {bad: 1}, 1.0),
        lambda: apply_penalties_mlx(logits, {bad: 1}, 1.0),
        lambda: apply_penalties_mlx(logits[0], None, penalty_overlay={bad: 1.0}),
    ]
    if bad >= 0:
        biased = SamplerConfig(logit_bias={bad: 1.0})
        calls.append(lambda: sample_token_ids_from_mlx_logits(logits, biased))
        calls.append(lambda: sparse_distribution_from_mlx_logits(logits[0], biased))
    for call in calls:
        with pytest.raises(ValueError, match=f"{bad}, outside"):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_never_changed(dtype):
    config = SamplerConfig(
        repetition_penalty=1.5, presence_penalty=1.0, logit_bias={0: 3.0, 2: -INF}
    )
    logits = random_logits(np.random.default_rng(3), 3, 100, dtype)
    before = host(logits)
    counts, prompt, overlay = [{1: 2}, {5: 1}, None], [3, 4], {6: 1.0}
    uniforms = np.array([0.1, 0.5, 0.9])
    sparse_distributions_from_mlx_logits(
        logits, config, token_counts=counts, prompt_ids=prompt, penalty_overlay=overlay
    )
    sample_token_ids_from_mlx_logits(logits, config, uniforms=uniforms)
    apply_penalties_mlx(logits[0], {1: 2}, 1.0, 1.0, overlay)
    np.testing.assert_array_equal(host(logits), before)
    assert (counts, prompt, overlay) == ([{1: 2}, {5: 1}, None], [3, 4], {6: 1.0})
    assert uniforms.tolist() == [0.1, 0.5, 0.9]


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 20000])
@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-38, 0.6, 1e35])
def test_rows_without_a_law_raise(vocab, temperature):
    for filters in ({}, {"top_p": 1.0, "top_k": 0}, {"top_k": 0}, {"top_k": 0, "min_p": 0.5}):
        config = SamplerConfig(temperature=temperature, **filters)
        for bad in (NAN, INF):
            for where in {0, vocab // 2, vocab - 1}:
                logits = np.zeros((3, vocab), np.float32)
                logits[1, where] = bad
                with pytest.raises(NonFiniteLogitsError, match="1 ") as caught:
                    sample_token_ids_from_mlx_logits(mx.array(logits), config)
                counts = (caught.value.nan_count, caught.value.inf_count)
                assert counts == ((1, 0) if bad != INF else (0, 1))
                assert caught.value.vocab_size == vocab
        logits = np.zeros((3, vocab), np.float32)
        logits[2] = -INF
        with pytest.raises(NonFiniteLogitsError, match=f"all {vocab} "):
            sample_token_ids_from_mlx_logits(mx.array(logits), config)


def test_shapes_are_checked():
    config = SamplerConfig()
    for shape in ((3,), (1, 2, 3), (0, 3), (3, 0)):
        with pytest.raises(ValueError, match="logits must be"):
            sparse_distributions_from_mlx_logits(mx.zeros(shape), config)
        with pytest.raises(ValueError, match="logits must be"):
            sample_token_ids_from_mlx_logits(mx.zeros(shape), config)
    for shape in ((2, 3), (1, 1, 3), (0,)):
        with pytest.raises(ValueError, match="logits must be"):
            sparse_distribution_from_mlx_logits(mx.zeros(shape), config)
    with pytest.raises(ValueError, match="token_counts"):
        sparse_distributions_from_mlx_logits(mx.zeros((2, 3)), config, token_counts=[None])


@pytest.mark.parametrize("bad", [[0.5], [0.5, 1.0], [-0.1, 0.5], [0.5, NAN], 0.5, [[0.5, 0.5]]])
def test_uniforms_are_checked(bad):
    with pytest.raises(ValueError, match="uniforms"):
        sample_token_ids_from_mlx_logits(mx.zeros((2, 3)), SamplerConfig(), uniforms=bad)


def test_sampling_without_uniforms_follows_the_law():
    config = SamplerConfig(temperature=1.0, top_p=1.0, top_k=2)
    logits = mx.broadcast_to(mx.log(mx.array([0.1, 0.6, 0.3])), (4000, 3))
    tokens = np.array(sample_token_ids_from_mlx_logits(logits, config))
    assert tokens.shape == (4000,)
    seen = np.bincount(tokens, minlength=3)
    assert seen[0] == 0
    assert abs(seen[1] / 4000 - 2 / 3) < 0.045  # six standard deviations
    again = np.array(sample_token_ids_from_mlx_logits(logits, config))
    assert (again != tokens).any()


def test_uniforms_at_the_ends():
    config = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0)
    logits = mx.array([[-INF, 0.0, 0.0, -INF]] * 3)
    tokens = sample_token_ids_from_mlx_logits(logits, config, uniforms=[0.0, 0.5, 1 - 2**-53])
    assert tokens.tolist() == [1, 2, 2]


def test_the_law_of_one_token():
    law = sparse_distribution_from_mlx_logits(mx.array([[3.0]]), SamplerConfig())
    assert law == SparseDistribution.one_hot(0, 1)


def test_the_vocabulary_is_never_sorted(monkeypatch):
    monkeypatch.setattr(fast, "_on_cpu", lambda: False)
    sorted_sizes = []

    def recording(function):
        def call(array, *args, **kwargs):
            sorted_sizes.append(array.shape[-1])
            return function(array, *args, **kwargs)

        return call

    for name in ("sort", "argsort"):
        monkeypatch.setattr(fast.mx, name, recording(getattr(mx, name)))
    logits = mx.random.normal((2, 49152))
    for filters in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}):
        config = SamplerConfig(temperature=0.7, **{"top_p": 1.0, "top_k": 0, **filters})
        fast.sparse_distributions_from_mlx_logits(logits, config)
    assert sorted_sizes
    assert max(sorted_sizes) <= 2048
