"""Counter-based randomness: known answers, the NumPy and MLX twins, keys, uniforms and races."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx import rng
from mtplx.rng import Domain, Draws, derive_key, exponentials, race, threefry2x32, uniforms
from mtplx.sampling import SparseDistribution

WORD = 2**32 - 1
# Upper 0.001 points of chi-square, by degrees of freedom.
CHI_SQUARE = {15: 37.70, 63: 103.4}


def words(key, counter):
    pair = [np.array([c], np.uint32) for c in counter]
    return tuple(int(w[0]) for w in threefry2x32(key, *pair))


def mlx_words(key, counter0, counter1):
    return [np.array(w) for w in threefry2x32(key, mx.array(counter0), mx.array(counter1))]


# --- Threefry ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((WORD, WORD), (WORD, WORD), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_random123(key, counter, expected):
    assert words(key, counter) == expected
    assert rng._fold(key, *counter) == expected
    found = mlx_words(key, *(np.array([c], np.uint32) for c in counter))
    assert tuple(int(w[0]) for w in found) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.tuples(st.integers(0, WORD), st.integers(0, WORD)),
    st.lists(st.tuples(st.integers(0, WORD), st.integers(0, WORD)), min_size=1, max_size=8),
)
def test_numpy_and_mlx_words_are_equal(key, counters):
    counter0, counter1 = np.array(counters, np.uint32).T.copy()
    for a, b in zip(
        threefry2x32(key, counter0, counter1), mlx_words(key, counter0, counter1), strict=True
    ):
        assert a.dtype == b.dtype == np.uint32
        np.testing.assert_array_equal(a, b)
    for pair in counters:
        assert rng._fold(key, *pair) == words(key, pair)


def test_numpy_and_mlx_words_are_equal_in_bulk_and_in_any_shape():
    ids = np.arange(60000, dtype=np.uint32).reshape(3, 200, 100)
    for key in ((WORD, 0), (0, WORD), (0x80000000, 0x7FFFFFFF)):
        position = np.full_like(ids, 0xFFFFFFF0)
        for a, b in zip(
            threefry2x32(key, ids, position), mlx_words(key, ids, position), strict=True
        ):
            assert a.shape == b.shape == ids.shape
            np.testing.assert_array_equal(a, b)


def test_threefry_does_not_change_its_counters():
    counter = np.arange(5, dtype=np.uint32)
    threefry2x32((1, 2), counter, counter)
    np.testing.assert_array_equal(counter, np.arange(5))


# --- uniforms and exponentials ----------------------------------------------------------------


def test_uniforms_are_52_bits_and_a_half():
    ids = np.arange(20000, dtype=np.int64)
    found = uniforms((3, 4), 17, ids)
    assert found.dtype == np.float64
    assert ((found > 0) & (found < 1)).all()
    first, second = threefry2x32((3, 4), ids.astype(np.uint32), np.full(20000, 17, np.uint32))
    for u, a, b in zip(found[:2000], first, second, strict=False):
        k = (int(a) << 20) | (int(b) >> 12)
        # (2k + 1) / 2^53, exactly
        assert float(u).as_integer_ratio()[1] == 2**53
        assert float(u) * 2**53 == 2 * k + 1
    assert abs(found.mean() - 0.5) < 6 / math.sqrt(12 * 20000)


@pytest.mark.parametrize(("words_", "expected"), [
    ((0, 0), 2.0**-53),
    ((WORD, WORD), 1 - 2.0**-53),
    ((0, 0xFFF), 2.0**-53),
    ((0x80000000, 0), 0.5 + 2.0**-53),
])  # fmt: skip
def test_the_ends_of_the_uniforms(monkeypatch, words_, expected):
    monkeypatch.setattr(rng.native, "loaded", None)
    given_words = tuple(np.array([[w]], np.uint32) for w in words_)
    monkeypatch.setattr(rng, "threefry2x32", lambda *_: given_words)
    monkeypatch.setattr(rng, "_fold", lambda *_: words_)
    for ids in (np.array([0]), np.array([[0]])):  # one token in integers, any others in arrays
        assert uniforms((0, 0), 0, ids).reshape(1)[0] == expected
    noise = exponentials((0, 0), 0, np.array([0]))[0]
    assert 0 < noise < np.inf
    assert math.isclose(noise, -math.log1p(-expected), rel_tol=1e-15)


def test_uniforms_are_uniform_in_every_direction():
    """Chi-square over token ids, positions, seeds and offsets, each by itself."""
    tokens = np.arange(16000)
    zero = np.zeros(1, np.int64)
    key = derive_key(Domain.RACE, 1)
    streams = {
        "tokens": uniforms(key, 5, tokens),
        "positions": [uniforms(key, i, zero)[0] for i in range(2000)],
        "seeds": [uniforms(derive_key(Domain.RACE, i), 0, zero)[0] for i in range(2000)],
        "offsets": [uniforms(derive_key(Domain.ACCEPT, 1, 0, i), 0, zero)[0] for i in range(2000)],
        "streams": [uniforms(derive_key(Domain.ACCEPT, 1, i), 0, zero)[0] for i in range(2000)],
    }
    for what, values in streams.items():
        values = np.asarray(values)
        seen, expected = np.bincount((values * 64).astype(int), minlength=64), len(values) / 64
        assert ((seen - expected) ** 2 / expected).sum() < CHI_SQUARE[63], what
        pairs = np.bincount(
            (values[:-1:2] * 4).astype(int) * 4 + (values[1::2] * 4).astype(int), minlength=16
        )
        expected = pairs.sum() / 16
        assert ((pairs - expected) ** 2 / expected).sum() < CHI_SQUARE[15], what


# --- keys -------------------------------------------------------------------------------------


def test_distinct_arguments_give_distinct_keys():
    seeds = [0, 1, 2, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    arguments = list(itertools.product(Domain, seeds, [0, 1, 2**32, 2**64 - 1], [0, 1, 2, WORD]))
    keys = [derive_key(*a) for a in arguments]
    assert len(set(keys)) == len(arguments)
    assert all(0 <= w <= WORD for key in keys for w in key)


def test_a_key_is_of_the_number_that_a_seed_is_now():
    seed = mx.array(5)
    assert derive_key(Domain.RACE, seed) == derive_key(Domain.RACE, 5)
    seed += 1
    assert derive_key(Domain.RACE, seed) == derive_key(Domain.RACE, 6)


def test_distinct_decisions_use_distinct_noise():
    """Every draw of a request, over positions, offsets and domains: no uniform occurs twice."""
    seen = {}
    zero = np.zeros(1, np.int64)
    for seed, stream in ((0, 0), (0, 1), (1, 0)):
        for position in range(20):
            for offset in range(4):
                for domain in (Domain.DRAFT, Domain.ACCEPT):
                    where = (domain, seed, stream, position, offset)
                    seen[where] = uniforms(derive_key(domain, seed, stream, offset), position, zero)
            for domain in (Domain.RESIDUAL, Domain.BONUS):
                where = (domain, seed, stream, position)
                seen[where] = uniforms(derive_key(domain, seed, stream), position, zero)
            seen[Domain.RACE, seed, position] = uniforms(
                derive_key(Domain.RACE, seed), position, zero
            )
    values = [float(u[0]) for u in seen.values()]
    assert len(set(values)) == len(values)


@pytest.fixture
def noise_used(monkeypatch):
    """Which (key, position) each method of ``Draws`` draws from."""
    used = []
    monkeypatch.setattr(rng, "race", lambda key, position, law: used.append((key, position)) or 0)
    real = rng.uniform

    def recording(key, position, token_id):
        used.append((key, position))
        return real(key, position, token_id)

    monkeypatch.setattr(rng, "uniform", recording)
    return used


def test_draws_use_the_keys_of_the_table(noise_used):
    draws, law = Draws(7, 9), np.array([0.5, 0.5])
    draws.race(3, law)
    draws.draft(3, 2, law)
    draws.accept(3, 2)
    draws.residual(3, law)
    draws.bonus(3, law)
    assert noise_used == [
        (derive_key(Domain.RACE, 7), 3),
        (derive_key(Domain.DRAFT, 7, 9, 2), 3),
        (derive_key(Domain.ACCEPT, 7, 9, 2), 3),
        (derive_key(Domain.RESIDUAL, 7, 9), 3),
        (derive_key(Domain.BONUS, 7, 9), 3),
    ]
    # RACE knows no stream: plain decoding and the coupled rule share it.
    Draws(7, 10).race(3, law)
    assert noise_used[-1] == noise_used[0]


def test_draws_are_a_function_of_their_keys():
    law = np.full(50, 0.02)

    def everything(draws):
        return [
            f
            for i in range(30)
            for f in (
                draws.race(i, law), draws.draft(i, i % 4, law), draws.accept(i, i % 4),
                draws.residual(i, law), draws.bonus(i, law),
            )
        ]  # fmt: skip

    one = everything(Draws(5, 6))
    assert one == everything(Draws(5, 6))
    assert one == everything(Draws(np.int64(5), np.uint64(6)))
    assert one != everything(Draws(5, 7))
    assert one != everything(Draws(6, 6))


@pytest.mark.parametrize(
    "bad", [-1, 2**64, 1.0, 0.5, True, False, "1", None, float("nan"), [1], np.float64(3)]
)
def test_bad_seeds_and_streams_are_refused(bad):
    Draws(1, 1)  # a cached key must not let 1.0 or True through
    Draws(0, 0)
    for arguments in ((bad,), (0, bad)):
        with pytest.raises(ValueError, match="seed" if len(arguments) == 1 else "stream"):
            Draws(*arguments)
        with pytest.raises(ValueError, match=r"\[0, 2\^64\)"):
            derive_key(Domain.RACE, *arguments)


@pytest.mark.parametrize("bad", [-1, 2**32, 1.0])
def test_bad_offsets_are_refused(bad):
    with pytest.raises(ValueError, match="offset"):
        Draws(0).accept(0, bad)


def test_the_ends_of_the_seeds_are_taken():
    for seed in (0, 2**64 - 1, np.uint64(2**64 - 1)):
        assert 0 < Draws(seed, seed).accept(0, 0) < 1


# --- the race ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "law",
    [
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.7, 0.1, 0.1, 0.05, 0.05],
        [0.0, 0.9, 0.0, 0.1],
        [0.001, 0.199, 0.8, 0.0, 0.0],
    ],
)
@pytest.mark.parametrize("domain", ["race", "draft", "residual", "bonus"])
def test_the_race_follows_the_law(law, domain):
    draws, law, count = Draws(11, 3), np.array(law), 2500
    if domain == "draft":
        tokens = [draws.draft(i, i % 3, law) for i in range(count)]
    else:
        tokens = [getattr(draws, domain)(i, law) for i in range(count)]
    seen = np.bincount(tokens, minlength=law.size)
    assert (seen[law == 0] == 0).all()
    seen, expected = seen[law > 0], law[law > 0] * count
    # The 0.999 quantile of chi-square by Wilson and Hilferty.
    degrees = seen.size - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert ((seen - expected) ** 2 / expected).sum() < bound


def test_race_is_the_argmin_of_exponential_noise_over_p():
    generator = np.random.default_rng(0)
    for position in range(200):
        law = generator.dirichlet(np.full(40, 0.3))
        noise = exponentials((1, 2), position, np.arange(40))
        clocks = [e / p if p > 0 else math.inf for e, p in zip(noise, law, strict=True)]
        assert race((1, 2), position, law) == clocks.index(min(clocks))


def test_two_races_under_one_noise_agree_as_often_as_they_should():
    """P(both a) = 1 / sum_v max(p_v / p_a, q_v / q_a), summed over a."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    expected = sum(1 / np.maximum(p / p[a], q / q[a]).sum() for a in range(3))
    draws, count = Draws(4), 3000
    agreed = sum(draws.race(i, p) == draws.race(i, q) for i in range(count))
    assert abs(agreed / count - expected) < 5 * math.sqrt(expected * (1 - expected) / count)
    assert all(draws.race(i, p) == draws.race(i, p.copy()) for i in range(50))


def test_ties_go_to_the_lower_id(monkeypatch):
    monkeypatch.setattr(rng.native, "loaded", None)
    monkeypatch.setattr(rng, "exponentials", lambda key, position, ids: np.ones(len(ids)))
    assert race((0, 0), 0, np.array([0.0, 0.25, 0.5, 0.25])) == 2
    assert race((0, 0), 0, np.array([0.0, 0.4, 0.4, 0.2])) == 1
    unsorted = SparseDistribution(np.array([3, 1, 2]), np.array([0.4, 0.4, 0.2]), 4)
    assert race((0, 0), 0, unsorted) == 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=1, max_size=30),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**20),
    st.randoms(),
)
def test_race_is_equal_on_sparse_and_dense_and_never_leaves_the_support(
    weights, seed, position, shuffle
):
    p = np.array(weights)
    if not p.sum():
        p[0] = 1.0
    p = p / p.sum()
    ids = np.arange(p.size)
    shuffle.shuffle(ids)
    support = np.flatnonzero(p)
    forms = [
        p,
        SparseDistribution(support, p[support], p.size),
        SparseDistribution(ids, p[ids], p.size),
        SparseDistribution(support, p[support], p.size + 1000),
    ]
    draws = Draws(seed)
    tokens = {draws.race(position, form) for form in forms}
    assert len(tokens) == 1
    assert p[tokens.pop()] > 0


def test_the_vocabulary_around_the_support_does_not_matter():
    """A token's noise depends on its id, not on its place in the support."""
    draws = Draws(8)
    for position in range(100):
        wide = np.full(30, 1 / 30)
        winner = draws.race(position, wide)
        assert draws.race(position, np.where(np.arange(30) % 2 == winner % 2, wide, 0)) == winner


def test_tiny_probabilities_give_no_warning(recwarn):
    for position in range(20):
        assert Draws(1).race(position, np.array([5e-324, 1.0, 1e-310])) == 1
    assert not recwarn.list


def test_draws_are_plain_python_numbers():
    draws, law = Draws(1), np.array([0.5, 0.5])
    for token in (draws.race(0, law), draws.draft(0, 0, law), draws.bonus(0, law)):
        assert type(token) is int
    assert type(draws.residual(0, SparseDistribution.one_hot(5, 9))) is int
    assert draws.residual(0, SparseDistribution.one_hot(5, 9)) == 5
    assert type(draws.accept(0, 0)) is float
