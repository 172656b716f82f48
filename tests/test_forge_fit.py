"""What is fitted to a head when its weights are there."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from test_forge_rounding import DATA, PLAN, SEEDS, data_of
from tiny import write_directory

from mtplx import load
from mtplx.fast_sampling import sparse_distributions_from_mlx_logits
from mtplx.forge.fit import fit_sharpness
from mtplx.forge.objective import rollout
from mtplx.forge.train import Trainer
from mtplx.sampler_config import SamplerConfig

DEPTH = 2
FACTORS = [0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk")
    write_directory(folder)
    bundle = load(folder, weights="float32")
    trainer = Trainer(bundle, data_of(bundle, folder / "data", SEEDS), PLAN)
    trainer.advance()
    return trainer


def kept(trainer, factor):
    """How many drafts of the held-out rows are kept, by both laws as they would be used."""
    attached, rows, total = trainer.attached, DATA.length - DEPTH, 0.0
    batch = trainer.data.check(DATA.length)
    states = rollout(attached, batch.features[:, :rows], batch.tokens, DEPTH)
    for j, state in enumerate(states, 1):
        final = batch.features[:, j : j + rows, : state.shape[-1]].astype(mx.float32)
        for temperature in (0.6, 1.0):
            config = SamplerConfig(temperature=temperature, top_p=0.95, top_k=20)
            for row, weights in enumerate(np.asarray(batch.weights)[:, j : j + rows]):
                logits = factor * attached.logits(state[row]), attached.logits(final[row])
                q, p = (sparse_distributions_from_mlx_logits(z, config) for z in logits)
                pairs = zip(q, p, strict=True)
                near = [np.minimum(a.to_dense(), b.to_dense()).sum() for a, b in pairs]
                total += weights @ near
    return total


@pytest.mark.parametrize("scale", [0.7, 1.0, 1.3])
def test_the_sharpness_keeps_the_most_by_brute_force(trainer, scale):
    head = trainer.head
    weight = head.norm.weight
    head.norm.weight = weight * scale
    try:
        found = fit_sharpness(trainer.attached, trainer.data, DEPTH)
        counts = [kept(trainer, factor) for factor in FACTORS]
    finally:
        head.norm.weight = weight
    assert counts[FACTORS.index(found)] == pytest.approx(max(counts), rel=1e-6)


def test_the_last_norm_s_scale_is_a_factor_on_the_logits_of_every_depth(trainer):
    attached, head = trainer.attached, trainer.head
    batch = trainer.data.check(DATA.length)
    rows, weight = DATA.length - DEPTH, head.norm.weight

    def logits():
        states = rollout(attached, batch.features[:, :rows], batch.tokens, DEPTH)
        return [np.asarray(attached.logits(state)) for state in states]

    before = logits()
    head.norm.weight = weight * 1.3
    try:
        after = logits()
    finally:
        head.norm.weight = weight
    for one, two in zip(before, after, strict=True):
        np.testing.assert_allclose(1.3 * one, two, rtol=1e-3, atol=1e-3)
