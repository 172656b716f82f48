"""SamplerConfig and SparseDistribution."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from law_oracle import INF, NAN

from mtplx.sampling import (
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
)

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
