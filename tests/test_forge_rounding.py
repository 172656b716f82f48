"""Training with the matrices that the CPU kernels will hold, and checks of prompts that are new."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from tiny import write_directory

from mtplx import load
from mtplx.cpu_head import BITS, _pack, rounded
from mtplx.forge.conversation import Kind, Seed, Style
from mtplx.forge.data import Data
from mtplx.forge.distil import DataPlan, distil, shard_path
from mtplx.forge.objective import losses
from mtplx.forge.train import Trainer, TrainPlan
from mtplx.native import status

DATA = DataPlan(seed=5, shards=1, rows=24, length=48, levels=(1,), style=Style(bare=0.2))
PLAN = TrainPlan(
    seed=5, steps=4, rows=6, window=24, depth=2, second=0.5, levels=(1,), vocabulary=160,
    core=64, drawn=48, check_every=6, warmup=2, streams=1,
)  # fmt: skip
SEEDS = [
    Seed(text, stem) for text in ("and the other", "of a day", "who") for stem in (True, False)
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk")
    write_directory(folder)
    return load(folder, weights="float32")


def data_of(bundle, folder, seeds, held_out=3):
    distil(bundle, seeds, DATA, folder)
    return Data([shard_path(folder, 0)], 320, held_out=held_out)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_rounded_matrix_is_what_the_kernels_hold(dtype):
    native = status().native
    if native is None:
        pytest.skip("the CPU kernels are not installed")
    weight = mx.array(np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32))
    weight = weight.astype(dtype)
    held = np.array(_pack(weight).rows(mx.arange(40)))
    assert np.abs(held - np.array(rounded(weight))).max() < 4e-3  # 16 bits of scales and biases
    assert np.abs(held - np.array(weight.astype(mx.float32))).max() > 0.05


def test_a_rounded_matrix_has_as_many_values_in_a_group_as_bits_allow():
    weight = mx.array(np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32))
    groups = np.asarray(rounded(weight)).reshape(-1, 32)
    assert max(len(np.unique(group)) for group in groups) <= 2**BITS
    assert np.abs(groups - np.asarray(weight).reshape(-1, 32)).max() < 0.3
    assert mx.array_equal(rounded(weight[:, :40]), weight[:, :40])  # no group divides it


def test_the_later_steps_take_loss_and_gradient_at_the_rounded_matrices(bundle, tmp_path):
    trainer = Trainer(bundle, data_of(bundle, tmp_path, SEEDS), PLAN)
    batch = trainer.data.batch(PLAN.rows, PLAN.window + 2, PLAN.seed, 2)
    before = tree_map(mx.array, trainer.head.parameters())
    trainer.step = 2
    loss, gradients = trainer._gradients(batch, 2)
    kept = zip(tree_flatten(trainer.head.parameters()), tree_flatten(before), strict=True)
    assert all(mx.array_equal(value, same) for (_, value), (_, same) in kept)

    attached = trainer.attached
    rows = attached.family.output_rows(trainer._ids.ids(2))
    parts = batch.features, batch.tokens, batch.weights
    weight = batch.weights[:, 1:].sum() * 2 + 1e-6

    def at(matrices, drafting):
        attached.head.update(tree_map(lambda w: matrices(w) if w.ndim == 2 else w, before))
        compare = PLAN.objective_at(2)
        return nn.value_and_grad(
            attached.head,
            lambda: losses(attached, *parts, (rows, drafting), 2, compare)[0] / weight,
        )()

    expected, expected_gradients = at(rounded, rounded(rows))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(loss) != pytest.approx(float(at(lambda w: w, rows)[0]), rel=1e-6)
    found = zip(tree_flatten(gradients), tree_flatten(expected_gradients), strict=True)
    for (name, one), (_, two) in found:
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), atol=1e-6, err_msg=name)


def test_rows_that_share_a_seed_with_a_check_are_not_trained_on(bundle, tmp_path):
    seeds = [Seed(f"{first} {second}") for first in ("and", "of", "who") for second in range(10)]
    data = data_of(bundle, tmp_path, seeds)

    def seeds_of(rows):
        given = []
        for tokens, kinds in zip(data.tokens[rows], data.kinds[rows], strict=True):
            marked = "".join("s" if kind == Kind.SEED else " " for kind in kinds)
            at = 0
            for part in marked.split(" "):
                given += [tuple(tokens[at : at + len(part)].tolist())] if part else []
                at += len(part) + 1
        return set(given)

    assert seeds_of(data.held)
    assert not seeds_of(data.held) & seeds_of(data.training)
    apart = set(range(DATA.rows)) - set(data.held.tolist()) - set(data.training.tolist())
    assert data.set_apart == len(apart) > 0
    assert all(seeds_of([row]) & seeds_of(data.held) for row in apart)


def test_with_few_seeds_all_other_rows_are_trained_on(bundle, tmp_path):
    data = data_of(bundle, tmp_path, SEEDS[:1])
    assert len(data.training) == DATA.rows - len(data.held)
    assert data.set_apart == 0
