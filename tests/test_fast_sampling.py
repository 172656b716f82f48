"""The MLX twin against the reference: same uniforms, same token; ties, borders, errors.

A token may differ only at a near-tie, within 2e-6 of a cumulative threshold, on at most 1e-4 of all
rows compared; ``test_near_ties_are_rare`` runs last and prints how many there were.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mtplx.fast_sampling as fast
from mtplx.fast_sampling import (
    _deterministic_mlx_top_k_support,
    _host_sparse_distribution,
    sample_token_ids_from_mlx_logits,
    sparse_distribution_from_mlx_logits,
    sparse_distributions_from_mlx_logits,
)
from mtplx.sampling import (
    SamplerConfig,
    apply_penalties,
    distribution_from_logits,
    sample_from_distribution,
    softmax,
)

INF, NAN = float("inf"), float("nan")
NEAR = 2e-6
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
COMPARED: Counter = Counter()  # what -> rows, near-ties


class One:
    """A generator that gives one uniform."""

    def __init__(self, uniform: float):
        self.uniform = float(uniform)

    def random(self) -> float:
        return self.uniform


def host(logits: mx.array) -> np.ndarray:
    return np.array(logits.astype(mx.float32)).astype(np.float64)


def near_tie(row: np.ndarray, config: SamplerConfig, uniform: float, law: np.ndarray) -> bool:
    """Whether the reference is within ``NEAR`` of choosing otherwise; ``row`` after penalties."""
    edges = [np.cumsum(law) - uniform]
    probs = softmax(row, config.temperature)
    ranked = probs[np.argsort(-row, kind="stable")]
    if config.top_p < 1.0:
        edges.append(np.cumsum(ranked) - config.top_p)
    if config.min_p > 0.0:
        edges.append((ranked - config.min_p * ranked[0]) / ranked[0])
    return min(np.abs(e).min() for e in edges) <= NEAR


def compare(what, logits: mx.array, config, uniforms, histories=None, **history) -> None:
    """Every row by twin and reference; a difference that is no near-tie fails at once."""
    histories = histories or [None] * logits.shape[0]
    if any(histories) or history:
        laws = sparse_distributions_from_mlx_logits(
            logits, config, token_counts=histories, **history
        )
        tokens = [sample_from_distribution(p, One(u)) for p, u in zip(laws, uniforms, strict=True)]
    else:
        drawn = sample_token_ids_from_mlx_logits(logits, config, uniforms=uniforms)
        assert drawn.dtype == mx.uint32
        tokens = drawn.tolist()
    for row, token, uniform, counts in zip(host(logits), tokens, uniforms, histories, strict=True):
        law = distribution_from_logits(row, config, token_counts=counts, **history)
        expected = sample_from_distribution(law, One(uniform))
        COMPARED["rows"] += 1
        if token == expected:
            continue
        assert not history, f"{what}: {token} instead of {expected} with {config}"
        after = np.asarray(
            apply_penalties(row, counts, config.presence_penalty, config.frequency_penalty)
        )
        assert near_tie(after, config, uniform, law), (
            f"{what}: {token} instead of {expected}, no near-tie, {config}, u = {uniform!r}"
        )
        COMPARED["near-ties"] += 1
        COMPARED[what] += 1


def random_config(generator: np.random.Generator) -> SamplerConfig:
    return SamplerConfig(
        temperature=float(generator.choice([0.0, 0.4, 0.6, 1.0, 1.5])),
        top_p=float(generator.choice([1.0, 0.5, 0.9, 0.95, 0.999])),
        top_k=int(generator.choice([0, 0, 1, 5, 20, 40, 10**6])),
        min_p=float(generator.choice([0.0, 0.0, 0.05, 0.3])),
    )


def random_logits(generator, rows: int, vocab: int, dtype: str) -> mx.array:
    spread = generator.choice([0.5, 2.0, 4.0])
    return mx.array(generator.normal(0, spread, (rows, vocab)).astype(np.float32)).astype(
        DTYPES[dtype]
    )


# --- same uniforms, same token ----------------------------------------------------------------


@pytest.fixture(scope="module", params=["kernel", "host", "device"], autouse=True)
def where_candidates_are_found(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "_on_cpu", lambda: request.param != "device")
        if request.param != "kernel":
            patch.setattr(fast, "_kernels", lambda: None)
        elif fast._kernels() is None:
            pytest.skip("there are no CPU kernels here")
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_token_vocabulary_32(dtype):
    generator = np.random.default_rng(list(DTYPES).index(dtype))
    for _ in range(40):
        logits = random_logits(generator, 250, 32, dtype)
        compare(f"V=32 {dtype}", logits, random_config(generator), generator.random(250))


SINGLE_FILTERS = [
    SamplerConfig(temperature=0.7, top_p=1.0, top_k=0),
    SamplerConfig(temperature=0.7, top_p=0.9, top_k=0),
    SamplerConfig(temperature=0.7, top_p=1.0, top_k=20),
    SamplerConfig(temperature=0.7, top_p=1.0, top_k=0, min_p=0.02),
    SamplerConfig(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01),
    SamplerConfig(temperature=0.0),
    SamplerConfig(),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "rows"), [(49152, 24), (151936, 6)])
def test_same_token_real_vocabularies(vocab, rows, dtype):
    generator = np.random.default_rng(vocab)
    for config in SINGLE_FILTERS:
        logits = random_logits(generator, rows, vocab, dtype)
        compare(f"V={vocab} {dtype}", logits, config, generator.random(rows))


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 4097])
def test_same_token_odd_vocabularies(vocab):
    generator = np.random.default_rng(vocab)
    for _ in range(12):
        logits = random_logits(generator, 20, vocab, "float32")
        compare(f"V={vocab}", logits, random_config(generator), generator.random(20))


@pytest.mark.parametrize("vocab", [32, 65, 3000])
def test_same_token_with_ties(vocab):
    """Rounded logits: ties at every cut-off, within blocks and across their borders."""
    generator = np.random.default_rng(vocab + 1)
    for _ in range(25):
        logits = mx.round(random_logits(generator, 20, vocab, "bfloat16"))
        compare(f"ties V={vocab}", logits, random_config(generator), generator.random(20))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_token_with_masks(dtype):
    generator = np.random.default_rng(9)
    for _ in range(20):
        logits = host(random_logits(generator, 20, 200, dtype))
        logits[generator.random(logits.shape) < 0.95] = -INF
        logits[:, 7] = 0.5
        rows = mx.array(logits.astype(np.float32)).astype(DTYPES[dtype])
        compare(f"masks {dtype}", rows, random_config(generator), generator.random(20))


@pytest.mark.parametrize("vocab", [32, 5000])
def test_same_token_with_penalties(vocab):
    generator = np.random.default_rng(vocab + 2)
    for _ in range(30):
        config = dataclasses.replace(
            random_config(generator),
            presence_penalty=float(generator.normal()),
            frequency_penalty=float(generator.normal()),
        )
        histories = [
            {int(t): int(generator.integers(0, 4)) for t in generator.integers(0, vocab, 9)}
            for _ in range(20)
        ]
        histories[3] = None
        logits = random_logits(generator, 20, vocab, "float32")
        compare(f"penalties V={vocab}", logits, config, generator.random(20), histories)


def test_same_token_with_bias_repetition_overlay_and_prompt():
    generator = np.random.default_rng(77)
    for _ in range(30):
        config = dataclasses.replace(
            random_config(generator),
            repetition_penalty=float(generator.choice([0.7, 1.3])),
            presence_penalty=0.5,
            logit_bias={int(t): float(generator.normal()) for t in generator.integers(0, 90, 5)},
        )
        compare(
            "bias and repetition",
            random_logits(generator, 20, 90, "float16"),
            config,
            generator.random(20),
            [{int(t): 1 for t in generator.integers(0, 90, 6)} for _ in range(20)],
            prompt_ids=generator.integers(0, 90, 10).tolist(),
            penalty_overlay={int(generator.integers(0, 90)): float(generator.normal())},
        )


def test_ties_made_by_penalties_differ_in_nothing_but_the_tied_tokens(capsys):
    """1.5 - 1.0 against 1.0 - 0.5: float32 and float64 may round such a tie to different sides.

    With top-k that is no cumulative threshold but a choice among tied tokens. Logits on a coarse
    grid and penalties of one decimal make it as frequent as it gets.
    """
    generator = np.random.default_rng(0)
    differing = 0
    for _ in range(40):
        config = SamplerConfig(
            temperature=1.0,
            top_p=1.0,
            top_k=int(generator.choice([5, 20])),
            presence_penalty=float(generator.choice([0.0, 0.1, 0.3])),
            frequency_penalty=float(generator.choice([0.1, 0.2, 0.3, 0.7])),
        )
        logits = (np.round(generator.normal(0, 2, (100, 100)) * 4) / 4).astype(np.float32)
        histories = [
            {int(t): int(generator.integers(1, 8)) for t in generator.integers(0, 100, 30)}
            for _ in logits
        ]
        laws = sparse_distributions_from_mlx_logits(
            mx.array(logits), config, token_counts=histories
        )
        for row, counts, law in zip(logits, histories, laws, strict=True):
            expected = distribution_from_logits(row, config, token_counts=counts)
            swapped = set(np.flatnonzero(expected).tolist()) ^ set(law.token_ids.tolist())
            differing += bool(swapped)
            after = apply_penalties(row, counts, config.presence_penalty, config.frequency_penalty)
            assert np.ptp([after[t] for t in swapped] or [0.0]) < 1e-6
    with capsys.disabled():
        print(f"\n  cut-offs decided by rounding: {differing} of 4000 rows made for it")
    assert differing <= 40


@pytest.mark.parametrize("vocab", [257, 300, 4096, 20000])
@pytest.mark.parametrize("top_k", [0, 10**6])
@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_candidates_grow_for_flat_distributions(vocab, top_k, spread):
    generator = np.random.default_rng(vocab)
    logits = generator.normal(0, 1, (2, vocab)).astype(np.float32) * np.float32(spread)
    for filters in ({"top_p": 0.999}, {"top_p": 1.0, "min_p": 0.97}, {"top_p": 0.3}):
        config = SamplerConfig(temperature=1.0, top_k=top_k, **filters)
        laws = sparse_distributions_from_mlx_logits(mx.array(logits), config)
        for row, law in zip(logits, laws, strict=True):
            expected = np.flatnonzero(distribution_from_logits(row, config))
            extra = set(expected.tolist()) ^ set(law.token_ids.tolist())
            if spread == 0.0:
                # Every p is 1/V; the only doubt is the one token at the cumulative threshold.
                assert len(extra) <= 1
                assert law.token_ids.tolist() == list(range(law.token_ids.size))
            else:
                assert len(extra) <= 1 + NEAR * vocab
            if filters == {"top_p": 0.999}:
                assert law.token_ids.size > 256


def test_probabilities_equal_the_reference():
    generator = np.random.default_rng(4)
    for config in SINGLE_FILTERS:
        logits = random_logits(generator, 4, 3000, "float32")
        laws = sparse_distributions_from_mlx_logits(logits, config)
        for row, law in zip(host(logits), laws, strict=True):
            assert (np.diff(law.token_ids) > 0).all()
            expected = distribution_from_logits(row, config)
            np.testing.assert_allclose(law.to_dense(), expected, rtol=1e-12, atol=0)


def test_batched_rows_equal_single_rows():
    generator = np.random.default_rng(6)
    for config in [*SINGLE_FILTERS, SamplerConfig(top_k=0, top_p=0.9999, temperature=1.5)]:
        config = dataclasses.replace(config, presence_penalty=0.7, repetition_penalty=1.2)
        logits = random_logits(generator, 5, 5000, "bfloat16")
        histories = [{1: 2}, None, {}, {4999: 1, 0: 3}, {7: 0}]
        history = {"prompt_ids": [3, 4], "penalty_overlay": {9: 1.5}}
        many = sparse_distributions_from_mlx_logits(
            logits, config, token_counts=histories, **history
        )
        for i, law in enumerate(many):
            for row in (logits[i], logits[i : i + 1]):
                assert law == sparse_distribution_from_mlx_logits(
                    row, config, token_counts=histories[i], **history
                )


def test_an_iterator_of_prompt_ids_serves_every_row():
    config = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=2.0)
    logits = mx.array([[1.0, 2.0, 3.0]] * 3)
    first, *rest = sparse_distributions_from_mlx_logits(logits, config, prompt_ids=iter([2]))
    assert all(law == first for law in rest)
    np.testing.assert_allclose(first.to_dense(), softmax([1.0, 2.0, 1.5]), rtol=1e-6)


# --- inner pieces -----------------------------------------------------------------------------


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.data())
def test_top_k_support_order_is_lexsort(data):
    vocab = data.draw(st.one_of(st.integers(1, 200), st.integers(201, 4000)))
    top_k = data.draw(st.integers(1, min(vocab, data.draw(st.sampled_from([3, 15, 4000])))))
    levels = data.draw(st.sampled_from([1, 2, 5, 50, 10**6]))
    generator = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rows = data.draw(st.integers(1, 3))
    values = generator.integers(-levels, levels, (rows, vocab)).astype(np.float32) / levels
    values[generator.random(values.shape) < 0.1] = data.draw(
        st.sampled_from([-0.0, 0.0, -INF, -1e30, 3e38])
    )
    values = np.where(generator.random(values.shape) < 0.5, values, values * -1.0)
    values[values == INF] = -INF
    ids, found = _deterministic_mlx_top_k_support(mx.array(values.astype(np.float32)), top_k)
    assert ids.shape == found.shape == (rows, top_k)
    for row, row_ids, row_values in zip(values, ids.tolist(), np.array(found), strict=True):
        expected = np.lexsort((np.arange(vocab), -row))[:top_k]
        assert row_ids == expected.tolist()
        np.testing.assert_array_equal(row_values, row[expected])


def test_top_k_support_keeps_leading_dimensions():
    logits = mx.array(np.random.default_rng(0).normal(size=(2, 3, 900)).astype(np.float32))
    for shape in ((900,), (3, 900), (2, 3, 900)):
        part = logits[(0,) * (3 - len(shape))]
        ids, values = _deterministic_mlx_top_k_support(part, 4)
        assert ids.shape == values.shape == (*shape[:-1], 4)
        flat = np.array(part).reshape(-1, 900)
        expected = np.argsort(-flat, axis=1, kind="stable")[:, :4]
        np.testing.assert_array_equal(np.array(ids).reshape(-1, 4), expected)


@pytest.mark.parametrize("vocab", [5, 64, 65, 40000])
def test_zeros_of_both_signs_tie(vocab):
    row = np.full(vocab, -1.0, np.float32)
    row[[1, 3]] = -0.0
    row[[2, vocab - 1]] = 0.0
    ids, _ = _deterministic_mlx_top_k_support(mx.array(row), 3)
    assert ids.tolist() == [1, 2, 3]
    greedy = SamplerConfig(temperature=0.0)
    assert sparse_distribution_from_mlx_logits(mx.array(row), greedy).token_ids.tolist() == [1]


def test_ties_across_block_borders_keep_the_lower_ids():
    row = np.zeros(64 * 1000 + 5, np.float32)
    row[[63, 64, 127, 128, 64 * 999, 64 * 1000, 64 * 1000 + 4]] = 5.0
    for top_k in range(1, 9):
        ids, _ = _deterministic_mlx_top_k_support(mx.array(row), top_k)
        expected = [63, 64, 127, 128, 63936, 64000, 64004, 0][:top_k]
        assert ids.tolist() == expected


def test_host_distribution_on_a_support_and_on_a_whole_row():
    config = SamplerConfig(temperature=1.0, top_p=0.8, top_k=0)
    row = np.log(np.array([0.1, 0.5, 0.1, 0.3], np.float32))
    whole = _host_sparse_distribution(row, config)
    assert whole.token_ids.tolist() == [1, 3]
    order = np.argsort(-row, kind="stable")
    mass = float(np.exp(row.astype(np.float64) - row.max()).sum())
    part = _host_sparse_distribution(row[order], config, token_ids=order, vocab_size=4, mass=mass)
    assert part.token_ids.tolist() == [1, 3]
    np.testing.assert_allclose(part.probs, whole.probs, rtol=1e-12)


# --- last -------------------------------------------------------------------------------------


def test_near_ties_are_rare(capsys):
    if not COMPARED["rows"]:
        pytest.skip("runs after the comparisons of this file")
    with capsys.disabled():
        print(f"\n  twin and reference: {dict(COMPARED)}")
    assert COMPARED["near-ties"] <= 1e-4 * COMPARED["rows"]
