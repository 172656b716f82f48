"""Rollback of every kind of cache: what is left equals a fresh prefill of what was kept."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from doubles import tiny_llama
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
)
from trunks import MODELS, VOCAB, WINDOW, trunk_of

from mtplx.errors import StateError
from mtplx.families import family_of
from mtplx.state import State

PROMPT = [3, 17, 5, 29, 11, 2, 38, 7, 23, 14, 31, 9, 26, 1, 19, 35, 4, 12, 28, 33]
BLOCK = [21, 6, 37, 15, 30]


@pytest.fixture(scope="module", autouse=True)
def no_compiler():
    """mx.compile would call a C++ compiler for seconds; these models are run a few times only."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def new_state(kind: str) -> State:
    trunk = trunk_of(kind)
    caches = None
    if kind == "quantised":
        caches = [QuantizedKVCache(group_size=32, bits=8) for _ in trunk.layers]
    state = State(family_of(trunk), caches)
    assert {type(cache) for cache in state.caches} == MODELS[kind][1]
    return state


def run_prefill(state: State, tokens: list[int], chunk: int = 512) -> State:
    for _ in state.prefill(tokens, chunk=chunk):
        pass
    return state


def leaves(caches: Any) -> list[Any]:
    out = []
    for cache in caches:
        out += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return out


def offsets(state: State) -> list[int]:
    return [leaf.offset for leaf in leaves(state.caches) if hasattr(leaf, "offset")]


def forward(state: State, tokens: list[int]) -> np.ndarray:
    _, logits = state.forward(tokens)
    return np.asarray(logits, dtype=np.float64)


def assert_is_prefill_of(state: State, kind: str, tokens: list[int], tolerance=1e-4) -> None:
    """Lengths and offsets equal, and so are the next logits: one row, then several."""
    fresh = run_prefill(new_state(kind), tokens)
    assert state.length == len(tokens)
    assert offsets(state) == offsets(fresh) == [len(tokens)] * len(offsets(fresh))
    for probe in ([8], [22, 13, 8], [16]):
        np.testing.assert_allclose(
            forward(state, probe), forward(fresh, probe), rtol=0, atol=tolerance
        )


def values(caches: Any) -> list[Any]:
    """Every array and number of the caches, by value."""

    def plain(x: Any) -> Any:
        if isinstance(x, mx.array):
            return np.array(x)
        if isinstance(x, (list, tuple)):
            return [plain(i) for i in x]
        return x

    return [plain(leaf.state) for leaf in leaves(caches)]


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, list):
        assert isinstance(b, list)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


# Lengths of prompts around the window: well before it, where the block crosses it, just at it,
# just after, and wrapped more than once.
LENGTHS = (1, WINDOW - 5, WINDOW - 3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)


@pytest.mark.parametrize("kind", MODELS)
def test_rejection_at_every_position_equals_a_fresh_prefill(kind):
    for length in LENGTHS:
        for keep in range(len(BLOCK) + 1):
            state = run_prefill(new_state(kind), PROMPT[:length])
            mark = state.mark(len(BLOCK))
            forward(state, BLOCK)
            state.rollback(mark, BLOCK[:keep])
            assert_is_prefill_of(state, kind, PROMPT[:length] + BLOCK[:keep])


@pytest.mark.parametrize("kind", MODELS)
def test_the_tests_would_see_a_rollback_that_is_missing(kind):
    """The probe's logits do differ when rejected tokens stay in the state."""
    wrong = run_prefill(new_state(kind), PROMPT[:9] + BLOCK[:2])
    right = run_prefill(new_state(kind), PROMPT[:9] + BLOCK[:1])
    assert np.abs(forward(wrong, [8]) - forward(right, [8])).max() > 1e-2


@pytest.mark.parametrize("kind", MODELS)
def test_rounds_in_a_row_with_blocks_and_rejections_of_every_size(kind):
    rng = np.random.default_rng(4)
    tokens = PROMPT[:4]
    state = run_prefill(new_state(kind), tokens, chunk=3)
    for turn in range(14):
        rows = rng.integers(0, VOCAB, size=1 + int(rng.integers(0, 5))).tolist()
        keep = int(rng.integers(1, len(rows) + 1))
        mark = state.mark(len(rows))
        forward(state, rows)
        state.rollback(mark, rows[:keep])
        tokens = tokens + rows[:keep]
        assert state.length == len(tokens), turn
    assert len(tokens) > 2 * WINDOW
    assert_is_prefill_of(state, kind, tokens)


@pytest.mark.parametrize("kind", MODELS)
def test_restore_gives_back_the_very_state_bit_for_bit(kind):
    for length in (WINDOW - 2, WINDOW + 2):
        state = run_prefill(new_state(kind), PROMPT[:length])
        untouched = run_prefill(new_state(kind), PROMPT[:length])
        mark = state.mark(4)
        forward(state, BLOCK[:4])
        state.restore(mark)
        assert state.length == length
        assert offsets(state) == offsets(untouched)
        np.testing.assert_array_equal(forward(state, [8]), forward(untouched, [8]))


@pytest.mark.parametrize("kind", MODELS)
def test_a_mark_can_be_gone_back_to_more_than_once(kind):
    """Caches assign into their arrays in place: a snapshot must not follow them."""
    state = run_prefill(new_state(kind), PROMPT[: WINDOW + 2])
    mark = state.mark(3)
    before = values(state.caches)
    first = []
    for _ in range(3):
        first.append(forward(state, BLOCK[:3]))
        forward(state, [1])
        forward(state, [2])
        state.restore(mark)
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[0], first[2])
    snapshots = [i for i, leaf in enumerate(leaves(state.caches)) if i in mark.snapshots]
    after = values(state.caches)
    for i in snapshots:
        assert_same(before[i], after[i])


def test_in_place_assignment_leaves_the_snapshot_alone():
    """One token after the window has wrapped is written into the ring itself."""
    state = run_prefill(new_state("rotating"), PROMPT)
    forward(state, [5])
    mark = state.mark(1)
    (index,) = mark.snapshots
    kept = np.array(mark.snapshots[index][0])
    forward(state, [6])
    assert not np.array_equal(kept, np.array(leaves(state.caches)[index].keys))
    np.testing.assert_array_equal(kept, np.array(mark.snapshots[index][0]))


def test_what_can_be_trimmed_is_not_snapshotted():
    state = run_prefill(new_state("plain"), PROMPT)
    assert not state.mark(5).snapshots
    early = run_prefill(new_state("rotating"), PROMPT[:2])
    assert not early.mark(WINDOW - 3).snapshots
    assert len(early.mark(WINDOW).snapshots) == 1


@pytest.mark.parametrize("kind", MODELS)
def test_keeping_more_than_was_run_raises(kind):
    state = run_prefill(new_state(kind), PROMPT[:6])
    mark = state.mark(3)
    forward(state, BLOCK[:2])
    with pytest.raises(StateError, match=r"3.*2"):
        state.rollback(mark, BLOCK[:3])


@pytest.mark.parametrize(
    "cache", [ConcatenateKVCache(), BatchKVCache([0]), CacheList(KVCache(), ConcatenateKVCache())]
)
def test_an_unknown_kind_of_cache_is_refused(cache):
    trunk = tiny_llama(3, vocab_size=VOCAB)
    with pytest.raises(StateError, match=r"ConcatenateKVCache|BatchKVCache"):
        State(family_of(trunk), [KVCache(), cache])


def test_a_subclass_is_an_unknown_kind_too():
    class Special(KVCache):
        pass

    with pytest.raises(StateError, match="Special"):
        State(family_of(tiny_llama(3, vocab_size=VOCAB)), [KVCache(), Special()])
