"""A forward of a few rows that is computed at once, against the same as MLX operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from fused_trunks import KINDS, VOCAB, fused_of, ids_of
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mtplx import cpu_head
from mtplx.cpu_layers import Stack
from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.families import family_of
from mtplx.mtp_patch import attach_head, new_head
from mtplx.native import status
from mtplx.state import State

native = status().native
pytestmark = pytest.mark.skipif(native is None, reason="the CPU kernels are not installed")


@pytest.fixture
def steps(monkeypatch):
    """How many rows each step had that was computed at once."""
    seen, real = [], Stack.trunk_step

    def counted(self, embedding, output, tokens, *rest):
        seen.append(len(tokens))
        return real(self, embedding, output, tokens, *rest)

    monkeypatch.setattr(Stack, "trunk_step", counted)
    return seen


def rows_of(caches, length):
    return [np.array(part[..., :length, :]) for c in caches for part in (c.keys, c.values)]


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_bits_of_a_forward(kind, bits, steps):
    trunk, _ = fused_of(kind, bits)
    family, ids = family_of(trunk, (1, 3)), ids_of(80).tolist()
    one, other = make_prompt_cache(trunk), make_prompt_cache(trunk)
    at, sizes = 0, [20, 1, 4, 32, 1, 2, 20]
    for size in sizes:
        part = ids[at : at + size]
        features, logits = family.step(part, one)
        expected = family.forward(mx.array(part)[None], other)
        assert np.array_equal(np.array(features), np.array(expected[0][0]))
        assert np.array_equal(np.array(logits), np.array(expected[1][0]))
        at += size
        assert [c.offset for c in one] == [c.offset for c in other] == [at] * 3
    assert steps == sizes
    for a, b in zip(rows_of(one, at), rows_of(other, at), strict=True):
        assert np.array_equal(a, b)


def test_what_the_kernels_do_not_do_at_once_goes_the_ordinary_way(steps):
    trunk, plain = fused_of("llama", 4)
    many, family = ids_of(33).tolist(), family_of(trunk)
    rotating = [RotatingKVCache(max_size=64) for _ in range(3)]
    halves = [KVCache() for _ in range(3)]
    for cache in halves:
        cache.update_and_fetch(*[mx.zeros((1, 2, 4, 16), mx.float16)] * 2)
    for caches, ids in ((make_prompt_cache(trunk), many), (rotating, many[:3]), (halves, [1])):
        features, logits = family.step(ids, caches)
        assert (features.shape, logits.shape) == ((len(ids), 64), (len(ids), 200))
    out = family_of(plain).step(many, make_prompt_cache(plain))[1]
    assert out.shape == (33, 200)
    assert steps == []


def test_a_step_writes_its_own_caches_in_place_and_nobody_else_s():
    trunk, _ = fused_of("llama", 4)
    family, caches = family_of(trunk), make_prompt_cache(trunk)
    family.step([1, 2, 3, 4], caches)

    def address():
        return np.asarray(caches[0].bank.array).ctypes.data

    first = address()
    family.step([5, 6], caches)
    assert address() == first
    held, before = caches[1].keys, rows_of(caches, 6)
    for cache in caches:
        cache.trim(2)
    family.step([7, 8], caches)  # `held` is a view: this one is a copy
    assert address() != first
    assert np.array_equal(np.array(held[..., :6, :]), before[2])
    assert not np.array_equal(rows_of(caches, 6)[2], before[2])


@pytest.mark.parametrize("place", ["before the caches know", "between two caches"])
def test_an_interrupted_step_is_taken_back(place, monkeypatch):
    trunk, _ = fused_of("llama", 4)
    state, fresh = State(family_of(trunk)), State(family_of(trunk))
    for one in (state, fresh):
        one.forward([1, 2, 3])
    real = Stack.trunk_step

    def cut(self, embedding, output, tokens, caches, levels):
        before = [cache.offset for cache in caches]
        real(self, embedding, output, tokens, caches, levels)
        caches[2].offset = before[2]
        if place == "before the caches know":
            for cache, offset in zip(caches, before, strict=True):
                cache.offset = offset
        raise KeyboardInterrupt

    mark = state.mark(4)
    with monkeypatch.context() as patch:
        patch.setattr(Stack, "trunk_step", cut)
        with pytest.raises(KeyboardInterrupt):
            state.forward([9, 9, 9, 9])
    state.restore(mark)
    assert [cache.offset for cache in state.caches] == [3, 3, 3]
    found, expected = (np.array(one.forward([4, 5])[1]) for one in (state, fresh))
    assert np.array_equal(found, expected)


def test_a_step_refuses_what_does_not_fit():
    trunk, _ = fused_of("llama", 4)
    family, caches = family_of(trunk), make_prompt_cache(trunk)
    family.step([1, 2], caches)
    run, rows = native.Layers(trunk.model.stack.layers, 1e-5), trunk.model.embed_tokens.matrix
    bank, other = caches[0].bank.array, native.Matrix.dense(mx.ones((4, 63)))
    for matrices, offset, message in (
        ((other, rows), 2, "do not fit"),
        ((rows, other), 2, "do not fit"),
        ((rows, rows), bank.shape[3] - 1, "no room"),
        ((rows, rows), -1, "no room"),
    ):
        with pytest.raises(ValueError, match=message):
            run.step(*matrices, [1, 2], offset, bank)
    _, logits, _ = run.step(rows, rows, [1, -1, 200], 2, bank)
    assert np.isnan(np.array(logits)).any(axis=1).tolist() == [False, True, True]


def test_a_step_over_no_rows_gives_none():
    trunk, _ = fused_of("llama", 4)
    caches = make_prompt_cache(trunk)
    family_of(trunk).step([1, 2], caches)
    run, rows = native.Layers(trunk.model.stack.layers, 1e-5), trunk.model.embed_tokens.matrix
    found = run.step(rows, rows, [], 2, caches[0].bank.array)
    assert [part.shape for part in found[:2]] == [(0, 64), (0, 200)]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_one_more_logit_is_that_of_its_row_of_the_output_head(name):
    trunk, _ = fused_of(name, 8)
    attached = attach_head(trunk, new_head(trunk, vocabulary=DraftVocabulary([1, 5, 9], VOCAB)))
    fused, rng = cpu_head.fuse(attached), np.random.default_rng(0)
    hidden = mx.array(rng.standard_normal((1, 64)).astype(np.float32))
    for token in (0, 6, VOCAB - 1):
        logits = fused.logits(hidden)
        found, plain = fused.joined(logits, hidden, token), attached.joined(logits, hidden, token)
        assert found.shape == plain.shape == (1, 4)
        assert np.array_equal(np.array(found[:, :3]), np.array(logits))
        row = np.array(attached.family.output_rows(np.array([token])), np.float64)
        expected = (np.array(hidden, np.float64) @ row.T).item()
        assert found[0, 3].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert plain[0, 3].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    matrix = status().native.Matrix.dense(mx.ones((4, 64)))
    for row in (-1, 4):
        with pytest.raises(ValueError, match="no such row"):
            matrix.joined(logits, hidden, row)
    for wrong in ((logits, hidden[:, 1:]), (logits, mx.zeros((2, 64))), (logits[0], hidden)):
        with pytest.raises(ValueError, match="must be"):
            matrix.joined(*wrong, 0)
