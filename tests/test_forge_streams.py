"""Threads that share a batch: what runs on them, what they raise, and how they end."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import write_directory

from mtplx import load
from mtplx.forge.conversation import Seed
from mtplx.forge.data import Data
from mtplx.forge.distil import DataPlan, distil, shard_path
from mtplx.forge.streams import shares, side_by_side
from mtplx.forge.train import Trainer, TrainPlan

DATA = DataPlan(seed=5, shards=1, rows=12, length=40, levels=(1,), streams=2)
PLAN = TrainPlan(
    seed=5, steps=6, rows=6, window=24, depth=2, second=0.5, levels=(1,), vocabulary=160,
    core=64, drawn=48, check_every=6, warmup=2, streams=2,
)  # fmt: skip


def trainer_of(bundle, folder, plan=PLAN):
    distil(bundle, [Seed("and the other")], DATA, folder)
    return Trainer(bundle, Data([shard_path(folder, 0)], 320, held_out=3), plan)


def trained(trainer):
    while not trainer.done:
        trainer.advance()
    return {k: np.asarray(v) for k, v in tree_flatten(trainer.head.trainable_parameters())}


def test_items_are_worked_on_side_by_side_each_on_its_own_thread():
    meet = threading.Barrier(2, timeout=30)

    def work(item):
        meet.wait()
        array = mx.ones(3) * item
        mx.eval(array)
        return threading.get_ident(), array

    first, second = side_by_side(work, [1, 2]), side_by_side(work, [3, 4])
    assert [float(array.sum()) for _, array in first + second] == [3, 6, 9, 12]
    threads = [thread for thread, _ in first + second]
    assert threads[:2] == threads[2:]
    assert len(set(threads)) == 2
    assert threading.get_ident() not in threads
    assert side_by_side(lambda _: threading.get_ident(), [5]) == [threading.get_ident()]


def test_what_one_of_them_raises_is_raised_when_all_have_ended():
    raised, ended = threading.Event(), []

    def work(item):
        if item == 0:
            raised.set()
            raise ValueError("of one")
        assert raised.wait(30)
        time.sleep(0.2)
        ended.append(item)

    with pytest.raises(ValueError, match="of one"):
        side_by_side(work, [0, 1])
    assert ended == [1]


def test_an_interrupt_is_raised_when_all_have_ended():
    ended = []

    def work(item):
        if item == 0:
            _thread.interrupt_main()
        time.sleep(0.5)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(work, [0, 1])
    assert sorted(ended) == [0, 1]


def test_shares_are_even_and_none_is_empty():
    assert [len(range(7)[part]) for part in shares(7, 3)] == [2, 2, 3]
    assert [len(range(2)[part]) for part in shares(2, 4)] == [1, 1]


@pytest.mark.parametrize("weights", ["float32", "auto"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)  # fmt: skip
def test_a_trunk_that_keeps_frequencies_is_used_on_all_threads(tmp_path, rope, weights):
    write_directory(tmp_path / "trunk", rope_scaling=rope)
    trainer = trainer_of(load(tmp_path / "trunk", weights=weights), tmp_path / "data")
    trainer.advance()
    assert trainer.step == 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return load(write_directory(tmp_path_factory.mktemp("trunk")), weights="float32")


def test_two_streams_make_nearly_the_head_of_one_and_may_take_over_from_it(bundle, tmp_path):
    one, two = (trainer_of(bundle, tmp_path, replace(PLAN, streams=n)) for n in (1, 2))
    for _ in range(3):
        one.advance()
    one.save(tmp_path / "checkpoint.safetensors")
    two.restore(tmp_path / "checkpoint.safetensors")
    expected, found = trained(one), trained(two)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=2e-3, err_msg=name)


_SCRIPT = """
from functools import partial
import mlx.core as mx
from mtplx.forge.streams import side_by_side

@partial(mx.compile, shapeless=True)
def gate(x, y):
    return x * mx.sigmoid(x) * y

def work(n):
    mx.eval(gate(mx.ones(n), mx.ones(n)))
    return n

print(side_by_side(work, [64, 96]))
"""


def test_a_process_whose_threads_ran_a_compiled_function_ends_well():
    """Compiled functions are kept by thread: 1 of 2 processes aborted as they were given back."""
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "[64, 96]\n", "")
