"""The caches of a fused trunk: in place where nothing else holds them, and never anybody else's."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from fused_trunks import by_steps, fused_of, ids_of, logits
from mlx_lm.models.cache import (
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from mtplx.families import family_of
from mtplx.native import status
from mtplx.state import State

pytestmark = pytest.mark.skipif(status().native is None, reason="the CPU kernels are not installed")


def test_rollback_is_exact_at_every_position():
    trunk, _ = fused_of("llama", 4)
    ids = ids_of(40).tolist()
    for kept in range(9):
        state = State(family_of(trunk))
        state.forward(ids[:20])
        mark = state.mark(8)
        state.forward(ids[20 : 20 + 8])
        state.rollback(mark, ids[20 : 20 + kept])
        found = np.array(state.forward([7, 8])[1])
        fresh = State(family_of(trunk))
        fresh.forward(ids[: 20 + kept])
        assert np.array_equal(found, np.array(fresh.forward([7, 8])[1]))


def test_what_else_holds_a_cache_s_arrays_does_not_see_them_change():
    trunk, _ = fused_of("llama", 4)
    cache = make_prompt_cache(trunk)
    logits(trunk, ids_of(10), cache)
    held = [(c.keys, np.array(c.keys).view(np.uint32)) for c in cache]
    logits(trunk, ids_of(3, seed=1), cache)
    for array, before in held:  # bit by bit: the spare room may hold NaN
        assert np.array_equal(np.array(array).view(np.uint32), before)


def test_a_cache_whose_arrays_are_views_is_read_right():
    trunk, _ = fused_of("llama", 4)
    ids = ids_of(20)
    expected = by_steps(trunk, ids, [15, 5])[0]
    again = make_prompt_cache(trunk)
    logits(trunk, ids[:15], again)
    for c in again:
        swapped = [mx.array(np.array(a).swapaxes(1, 2)).swapaxes(1, 2) for a in (c.keys, c.values)]
        c.keys, c.values = swapped
    assert np.array_equal(logits(trunk, ids[15:], again), expected[15:])


def test_nothing_is_copied_where_nothing_else_holds_the_caches():
    trunk, _ = fused_of("llama", 4)
    cache, places = make_prompt_cache(trunk), set()
    for rows in (10, 1, 4, 1):
        logits(trunk, ids_of(rows), cache)
        places.add(np.asarray(cache[0].bank.array).ctypes.data)
    assert len(places) == 1


def test_hidden_states_that_wait_do_not_make_a_prefill_copy_the_caches():
    trunk, _ = fused_of("llama", 4)
    state, held, places = State(family_of(trunk)), [], set()
    for hidden in state.prefill(ids_of(200).tolist(), chunk=20):
        held.append(hidden)
        places.add(np.asarray(state.caches[0].bank.array).ctypes.data)
    assert len(held) == 10
    assert len(places) == 1


def test_no_forward_starts_ahead_where_it_would_copy_the_caches():
    trunk, _ = fused_of("llama", 4)
    state = State(family_of(trunk))
    logits_ = state.forward(ids_of(5).tolist())[1]
    place = np.asarray(state.caches[0].bank.array).ctypes.data
    for _ in range(6):
        likely = mx.argmax(logits_[-1:], axis=-1, keepdims=True).astype(mx.int32)
        mx.async_eval(logits_)
        state.run_ahead(likely)
        logits_ = state.forward(np.asarray(likely)[0].tolist())[1]
    mx.eval(logits_)
    assert np.asarray(state.caches[0].bank.array).ctypes.data == place


def test_a_copied_or_a_saved_cache_is_one_of_its_own(tmp_path):
    trunk, _ = fused_of("llama", 4)
    ids = ids_of(30)
    expected = by_steps(trunk, ids, [20, 10])[0][20:]
    cache = make_prompt_cache(trunk)
    logits(trunk, ids[:20], cache)
    save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    copies = [copy.copy(c) for c in cache]
    logits(trunk, ids_of(10, seed=5), copies)
    assert np.array_equal(logits(trunk, ids[20:], cache), expected)
    loaded = load_prompt_cache(str(tmp_path / "c.safetensors"))
    assert np.array_equal(logits(trunk, ids[20:], loaded), expected)


def test_caches_of_different_room_move_into_one_bank():
    trunk, _ = fused_of("llama", 4)
    ids = ids_of(30)
    expected = by_steps(trunk, ids, [20, 10])[0][20:]
    cache = make_prompt_cache(trunk)
    logits(trunk, ids[:20], cache)
    cache[1].keys, cache[1].values = cache[1].keys[..., :20, :], cache[1].values[..., :20, :]
    assert np.array_equal(logits(trunk, ids[20:], cache), expected)


def test_a_cache_written_by_others_is_an_ordinary_one_and_comes_back():
    trunk, _ = fused_of("llama", 4)
    ids = ids_of(24)
    expected = by_steps(trunk, ids, [10, 4, 10])[0]
    cache = make_prompt_cache(trunk)
    logits(trunk, ids[:10], cache)
    x = trunk.model.embed_tokens(mx.array(ids[10:14])[None])
    for layer, own in zip(trunk.model.layers, cache, strict=True):  # as whoever runs single layers
        x = layer(x, "causal", own)
    assert [c.offset for c in cache] == [14, 14, 14]
    found = logits(trunk, ids[14:], cache)
    assert np.array_equal(found, expected[14:])
    keys = mx.ones((1, 2, 1, 16))
    first = np.array(cache[1].keys[..., :24, :])
    cache[1].update_and_fetch(keys, keys)
    assert type(cache[1]) is KVCache
    assert type(cache[0]) is not KVCache
    assert np.array_equal(np.array(cache[1].keys[..., :24, :]), first)


def test_caches_of_several_sequences_leave_their_bank_and_come_back():
    trunk, _ = fused_of("llama", 4)
    ids = np.stack([ids_of(24, seed) for seed in range(3)])
    alone = [by_steps(trunk, row, [10, 4, 10]) for row in ids]
    cache = make_prompt_cache(trunk)
    trunk(mx.array(ids[:, :10]), cache=cache)
    x = trunk.model.embed_tokens(mx.array(ids[:, 10:14]))
    for layer, own in zip(trunk.model.layers, cache, strict=True):  # as whoever runs single layers
        x = layer(x, "causal", own)
    found = np.array(trunk(mx.array(ids[:, 14:]), cache=cache))
    assert np.array_equal(found, np.stack([logits_[14:] for logits_, _ in alone]))
    bank = cache[0].bank
    assert all(c.bank is bank and c.keys.shape[:2] == (3, 2) for c in cache)
    for i, (_, own) in enumerate(alone):
        for one, two in zip(cache, own, strict=True):
            assert np.array_equal(np.array(one.keys[i, :, :24]), np.array(two.keys[0, :, :24]))
            assert np.array_equal(np.array(one.values[i, :, :24]), np.array(two.values[0, :, :24]))
    one, rows = mx.ones((3, 2, 1, 16)), np.array(cache[1].keys[:, :, :24])
    cache[1].update_and_fetch(one, one)
    assert type(cache[1]) is KVCache
    assert np.array_equal(np.array(cache[1].keys[:, :, :24]), rows)


def test_lockstep_copies_the_caches_only_where_they_grow():
    trunk, _ = fused_of("llama", 4)
    cache, places = make_prompt_cache(trunk), set()
    for at in range(150):
        mx.eval(trunk(mx.full((4, 1), at), cache=cache))
        bank = cache[0].bank
        places.add((bank.array.shape[3], np.asarray(bank.array).ctypes.data))
    assert [room for room, _ in sorted(places)] == [64, 128, 192]


def test_caches_grow_past_their_steps():
    trunk, plain = fused_of("llama", 4)
    ids = ids_of(530)
    found = by_steps(trunk, ids, [255, 2, 254, 1])[0]
    expected = by_steps(plain, ids, [255, 2, 254, 1])[0]
    assert np.abs(found - expected).max() < 5e-4 * np.abs(expected).max()
