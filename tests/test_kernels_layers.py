"""Trunks and heads on the CPU kernels, against mlx-lm's own layers over the same weights."""

from __future__ import annotations

import copy
import subprocess
import sys
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from doubles import randomise
from fused_trunks import KINDS, SIZES, VOCAB, by_steps, fused_of, ids_of, logits, trunk_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mtplx import cpu_head
from mtplx.cpu_layers import PackedEmbedding, PackedLinear, fuse, serves, takes
from mtplx.families import family_of
from mtplx.load import load, to_float32
from mtplx.mtp_patch import attach_head, new_head
from mtplx.native import status

native = status().native
pytestmark = pytest.mark.skipif(native is None, reason="the CPU kernels are not installed")


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_mlx_lm_s(kind, bits):
    trunk, plain = fused_of(kind, bits)
    ids = ids_of(150)
    expected = by_steps(plain, ids, [140, 1, 4, 1])[0]
    for sizes in ([140, 1, 4, 1], [1], [150]):
        found = by_steps(trunk, ids, sizes)[0]
        assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("level", native.levels() if native else [])
def test_every_level_gives_the_same_within_rounding(level):
    trunk, plain = fused_of("llama", 4)
    before = native.isa()
    native.choose(level)
    try:
        found = by_steps(trunk, ids_of(40), [33, 1])[0]
    finally:
        native.choose(before)
    expected = by_steps(plain, ids_of(40), [33, 1])[0]
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


def test_verify_logits_are_ar_logits_bit_for_bit():
    trunk, _ = fused_of("qwen3", 4)
    ids = ids_of(600)
    alone = by_steps(trunk, ids, [1])[0]
    for depth in range(2, 10):
        assert np.array_equal(by_steps(trunk, ids, [depth])[0], alone), depth
    assert np.array_equal(by_steps(trunk, ids, [600])[0], alone)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12), seed=st.integers(0, 999))
def test_steps_of_any_sizes_give_the_same_bits(sizes, seed):
    trunk, ids = TRUNK[0], ids_of(sum(sizes), seed)
    found, cache = by_steps(trunk, ids, [*sizes, 1])
    expected, other = by_steps(trunk, ids, [1])
    assert np.array_equal(found, expected)
    for one, two in zip(cache, other, strict=True):
        n = len(ids)
        assert np.array_equal(np.array(one.keys[..., :n, :]), np.array(two.keys[..., :n, :]))
        assert np.array_equal(np.array(one.values[..., :n, :]), np.array(two.values[..., :n, :]))


TRUNK = [fused_of("llama", 4)[0]] if native else []


def test_levels_are_the_layers_outputs_and_do_not_change_the_rest():
    trunk, plain = fused_of("llama", 8)
    ids = mx.array(ids_of(30))[None]
    features, out = family_of(trunk, (1, 3)).forward(ids, make_prompt_cache(trunk))
    expected, other = family_of(plain, (1, 3)).forward(ids, make_prompt_cache(plain))
    assert features.shape == (1, 30, 3 * 64)
    assert mx.abs(features - expected).max().item() < 1e-4 * mx.abs(expected).max().item()
    assert mx.abs(out - other).max().item() < 2e-4 * mx.abs(other).max().item()
    whole = family_of(trunk).forward(ids, make_prompt_cache(trunk))[1]
    assert np.array_equal(np.array(whole), np.array(out))


def in_lockstep(trunk, ids, sizes, levels=()):
    """Features and logits of ids (B, L), run in forwards of the given sizes; and the caches."""
    family, cache, at, out = family_of(trunk, levels), make_prompt_cache(trunk), 0, []
    for size in sizes:
        out.append(family.forward(mx.array(ids[:, at : at + size]), cache))
        at += size
    assert at == ids.shape[1]
    features, logits_ = (
        np.concatenate([np.array(part) for part in p], 1) for p in zip(*out, strict=True)
    )
    return features, logits_, cache


@pytest.mark.parametrize("sizes", [[1] * 70, [3, 1, 20, 3, 20, 3, 20], [70]])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "window"])
def test_sequences_in_lockstep_have_the_bits_that_each_has_alone(kind, sizes):
    trunk, plain = windowed() if kind == "window" else fused_of(kind, 4)
    ids = np.stack([ids_of(70, seed) for seed in range(5)])
    features, found, _ = in_lockstep(trunk, ids, sizes, (1, 3))
    for i in range(5):
        alone = in_lockstep(trunk, ids[i : i + 1], [1] * 70, (1, 3))
        assert np.array_equal(features[i : i + 1], alone[0])
        assert np.array_equal(found[i : i + 1], alone[1])
    expected = np.array(plain(mx.array(ids), cache=make_prompt_cache(plain)))
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()
    without = np.array(trunk(mx.array(ids)))  # no caches: mlx-lm's own way
    assert np.abs(without - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("level", native.levels() if native else [])
def test_every_level_gives_a_sequence_the_same_bits_in_any_company(level):
    trunk, _ = fused_of("qwen3", 8)
    ids = np.stack([ids_of(80, seed) for seed in range(40)])
    before = native.isa()
    native.choose(level)
    try:
        found = in_lockstep(trunk, ids, [64, 3, 12, 1])[1]
        alone = [in_lockstep(trunk, ids[i : i + 1], [79, 1])[1] for i in (0, 17, 39)]
    finally:
        native.choose(before)
    assert np.array_equal(found[[0, 17, 39]], np.concatenate(alone))


def test_caches_of_another_number_of_sequences_are_refused():
    trunk, _ = fused_of("llama", 4)
    stack = trunk.model.stack
    run, x = native.Layers(stack.layers, 1e-5), mx.zeros((2, 3, 64))
    for heads, room, message in ((2, 8, "2 sequences"), (6, 8, "2 sequences"), (4, 2, "no room")):
        with pytest.raises(ValueError, match=message):
            run(x, 0, mx.zeros((3, 2, heads, room, 16)))
    cache = make_prompt_cache(trunk)
    logits(trunk, ids_of(4), cache)
    assert takes(x[:1], cache)
    assert not takes(x, cache)
    assert not takes(x[:, :0], make_prompt_cache(trunk))


def test_another_cache_goes_the_ordinary_way():
    trunk, plain = fused_of("llama", 4)
    ids = mx.array(ids_of(12))[None]
    found = trunk(ids, cache=[RotatingKVCache(8) for _ in range(3)])
    expected = plain(ids, cache=[RotatingKVCache(8) for _ in range(3)])
    assert mx.abs(found - expected).max().item() < 2e-4 * mx.abs(expected).max().item()


def windowed():
    """A trunk with a window in its middle layer, and the plain one that it stands for."""
    config = SIZES | KINDS["llama"] | {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 7,
    }  # fmt: skip
    module = import_module("mlx_lm.models.llama")
    plain = module.Model(module.ModelArgs.from_dict(config)).eval()
    randomise(plain, 3)
    trunk = module.Model(module.ModelArgs.from_dict(config)).eval()
    trunk.update(plain.parameters())
    assert fuse(trunk)
    trunk.make_cache = plain.make_cache = lambda: [KVCache() for _ in range(3)]
    return trunk, plain


@pytest.mark.parametrize("steps", [[1], [9], [40]])
def test_a_window_hides_what_lies_before_it(steps):
    trunk, plain = windowed()
    ids = ids_of(40)
    cache = [KVCache() for _ in range(3)]
    found = np.concatenate(
        [logits(trunk, ids[i : i + steps[0]], cache) for i in range(0, 40, steps[0])]
    )
    expected = logits(plain, ids, [KVCache() for _ in range(3)])
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


def test_a_trunk_holds_no_second_copy_of_its_matrices():
    trunk, _ = fused_of("untied", 4)
    left = dict(tree_flatten(trunk.parameters()))
    assert all(name.endswith("norm.weight") for name in left), sorted(left)
    assert isinstance(trunk.model.embed_tokens, PackedEmbedding)
    assert isinstance(trunk.lm_head, PackedLinear)


def test_operations_hold_nothing_of_python():
    matrix = native.Matrix.dense(mx.ones((64, 64)))
    norms = [mx.ones(64), mx.ones(64), None, None]
    layer = native.layer([matrix] * 7, norms, 1e-5, 4, 4, 0.25, 0, [])

    def references():
        return sys.getrefcount(matrix), sys.getrefcount(layer)

    before = references()
    stack = native.Layers([layer], 1e-5)
    head = native.Combine(matrix, [matrix] * 2, mx.ones(64), mx.ones(64), 1e-5)
    x, caches = mx.ones((1, 2, 64)), mx.zeros((1, 2, 4, 8, 16))
    held = [stack, head, matrix(x), matrix.rows(mx.array([1])), *stack(x, 0, caches)]
    assert references() == before
    del held


# Ends while MLX's thread runs the layers, of which it then holds the last reference.
EXIT = """
import sys
import mlx.core as mx
from mtplx.native import status

def started(rows, size=512, native=status().native):
    matrices = [native.Matrix.dense(mx.zeros((size, size)))] * 7
    norms = [mx.ones(size), mx.ones(size), None, None]
    stack = native.Layers([native.layer(matrices, norms, 1e-5, 8, 8, 0.125, 0, [])], 1e-5)
    out = stack(mx.ones((1, rows, size)), 0, mx.zeros((1, 2, 8, rows, size // 8)))
    mx.async_eval(out)

started(int(sys.argv[1]))
sys.exit(130)
"""


@pytest.mark.parametrize("rows", [50, 200, 800])
def test_a_process_can_end_while_layers_run(rows):
    command = [sys.executable, "-c", EXIT, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_output_rows_and_a_new_layer_are_plain():
    trunk, plain = fused_of("llama", 8)
    family = family_of(trunk)
    ids = np.array([3, 0, 199])
    found, expected = family.output_rows(ids), family_of(plain).output_rows(ids)
    assert mx.abs(found - expected).max().item() < 1e-6
    layer = family.new_layer()
    assert {type(m) for m in layer.modules()} & {PackedLinear} == set()
    gradient = nn.value_and_grad(layer, lambda x: layer(x, "causal", None).sum())(
        mx.ones((2, 3, 64))
    )[1]
    assert all(mx.isfinite(g).all().item() for _, g in tree_flatten(gradient))


def test_a_copied_layer_can_be_made_plain_and_trained():
    trunk, plain = fused_of("qwen2", 8)
    copied = to_float32(copy.deepcopy(trunk.model.layers[-1]))
    x = mx.array(np.random.default_rng(0).standard_normal((1, 5, 64)).astype(np.float32))
    expected = plain.model.layers[-1](x, "causal", None)
    assert mx.abs(copied(x, "causal", None) - expected).max().item() < 1e-3
    copied.mlp.down_proj.weight = mx.zeros_like(copied.mlp.down_proj.weight)
    changed = copied(x, "causal", KVCache())  # the weights it has now, not the ones it came from
    assert mx.abs(changed - expected).max().item() > 1e-2
    assert trunk.model.layers[-1].stack is not None


@pytest.mark.parametrize("first", [True, False])
def test_a_head_drafts_as_its_rounded_weights_do_in_float(first):
    trunk, _ = fused_of("llama", 8)
    head = new_head(trunk, embedding_first=first, levels=(1, 2))
    randomise(head, 1, 0.3)
    fused = cpu_head.fuse(attach_head(trunk, head))
    for module in head.modules():  # what the kernels round, rounded by MLX
        if isinstance(module, nn.Linear):
            packed = mx.quantize(module.weight, group_size=32, bits=4)
            halves = [part.astype(mx.float16).astype(mx.float32) for part in packed[1:]]
            module.weight = mx.dequantize(packed[0], *halves, group_size=32, bits=4)
    plain = attach_head(trunk, head)
    assert isinstance(fused, cpu_head.FusedHead)
    rng = np.random.default_rng(0)
    caches = fused.new_cache(), plain.new_cache()
    for rows, width in ((9, 192), (1, 192), (1, 64), (1, 64)):
        state = mx.array(rng.standard_normal((rows, width)).astype(np.float32))
        tokens = mx.array(rng.integers(0, VOCAB, rows))
        found = fused.forward(state, tokens, caches[0])
        expected = plain.forward(state, tokens, caches[1])
        assert mx.abs(found - expected).max().item() < 1e-4 * mx.abs(expected).max().item()
        assert caches[0].offset == caches[1].offset
    assert np.array_equal(np.array(fused.logits(found)), np.array(plain.logits(found)))


def test_a_step_of_a_head_writes_its_own_cache_in_place_and_nobody_else_s():
    trunk, _ = fused_of("llama", 8)
    head = new_head(trunk)
    fused = cpu_head.fuse(attach_head(trunk, head))
    state = mx.array(np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32))
    tokens = mx.arange(6)
    caches = [fused.new_cache() for _ in range(2)]
    whole = np.array(fused.forward(state, tokens, caches[0]))
    address = np.asarray(caches[0].bank.array).ctypes.data
    held, before = caches[0].keys, np.array(caches[0].keys)
    caches[0].trim(4)
    fused.forward(-state[2:], tokens[2:], caches[0])  # `held` is a view: this one is a copy
    assert np.asarray(caches[0].bank.array).ctypes.data != address
    assert np.array_equal(np.array(held), before, equal_nan=True)
    address = np.asarray(caches[0].bank.array).ctypes.data
    caches[0].trim(4)
    again = np.array(fused.forward(state[2:], tokens[2:], caches[0]))
    assert np.asarray(caches[0].bank.array).ctypes.data == address
    one_by_one = [fused.forward(state[i : i + 1], tokens[i : i + 1], caches[1]) for i in range(6)]
    assert np.array_equal(np.concatenate(one_by_one), whole)
    assert np.array_equal(again, whole[2:])


def test_a_step_of_a_head_refuses_what_does_not_fit():
    trunk, _ = fused_of("llama", 8)
    fused = cpu_head.fuse(attach_head(trunk, new_head(trunk)))
    for state, tokens, message in (
        (mx.zeros((2, 63)), mx.arange(2), "state"),
        (mx.zeros((2, 256)), mx.arange(2), "state"),
        (mx.zeros((2, 64)), mx.arange(3), "one token"),
    ):
        with pytest.raises(ValueError, match=message):
            fused.forward(state, tokens, fused.new_cache())
    matrix = status().native.Matrix.dense(mx.ones((4, 64)))
    with pytest.raises(ValueError, match="must be"):
        matrix.now(mx.zeros((1, 63)))
    for result in (matrix.now, lambda x: fused.forward(x, mx.arange(2), fused.new_cache())):
        with pytest.raises(ValueError, match="gradient"):  # not one of zeros
            mx.grad(lambda x, result=result: result(x).sum())(mx.zeros((2, 64)))


def test_a_step_of_a_head_over_no_rows_gives_none():
    trunk, _ = fused_of("llama", 8)
    fused = cpu_head.fuse(attach_head(trunk, new_head(trunk)))
    cache = fused.new_cache()
    fused.forward(mx.zeros((2, 64)), mx.arange(2), cache)
    run = native.Layers(fused._stack.layers, 1e-5)
    out, _ = fused._combine.step(run, mx.zeros((0, 64)), [], 2, cache.bank.array)
    assert out.shape == (0, 64)


def test_a_trunk_that_is_not_fused_keeps_its_head_as_it_is():
    _, plain = trunk_of("llama")
    attached = attach_head(plain, new_head(plain))
    assert cpu_head.fuse(attached) is attached


def test_what_is_served():
    assert serves("llama")
    assert serves("qwen3")
    assert not serves("deepseek_v3")
    assert not serves(None)


def test_no_leak_over_many_steps():
    def rss():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    trunk = TRUNK[0]
    cache = make_prompt_cache(trunk)

    def steps(n):
        for _ in range(n):
            mx.eval(trunk(mx.array([[5]]), cache=cache))
            for c in cache:
                c.trim(1)

    steps(300)
    before = rss()
    steps(10_000)
    assert rss() - before < 4 << 20


@pytest.mark.model
def test_the_default_model_runs_from_its_own_weights(default_model_path):
    bundle = load("SmolLM2-135M-Instruct", head="none")
    trunk = bundle.trunk
    assert trunk.model.stack is not None
    assert trunk.model.layers[0].mlp.up_proj.matrix.nbytes == 1536 * 576 * 5 // 8  # 4 bits + scales
    ids = np.random.default_rng(0).integers(0, 49152, 160).astype(np.int32)
    alone = by_steps(trunk, ids, [100, 1])[0]
    for size in (4, 8):
        assert np.array_equal(by_steps(trunk, ids, [100, size])[0], alone)
