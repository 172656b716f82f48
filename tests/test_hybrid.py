"""Trunks with recurrent layers: taken back to any token by their recurrence alone."""

from __future__ import annotations

import copy
import gc
import traceback
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from doubles import GREEDY, PLAIN, BlockDrafter, new_sequence, same_or_near_tie
from mlx_lm.models import nemotron_h, qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache
from test_state import (
    BLOCK,
    PROMPT,
    assert_is_prefill_of,
    assert_same,
    forward,
    leaves,
    new_state,
    run_prefill,
)
from test_state import no_compiler as no_compiler
from test_state_faults import Interrupt, mixers
from trunks import HYBRIDS, MODELS, VOCAB, trunk_of

from mtplx import engine
from mtplx.drafters.ngram import NgramDrafter
from mtplx.families import family_of
from mtplx.recurrent import Tape, recording
from mtplx.state import State

STOCK = (
    qwen3_5.GatedDeltaNet,
    qwen3_next.Qwen3NextGatedDeltaNet,
    nemotron_h.NemotronHMamba2Mixer,
)
# Of a convolution kernel of 4: no token, fewer than it sees back, as many, more.
LENGTHS = (0, 1, 2, 3, 9)
ROWS = [21, 6, 37, 15, 30, 8]


def recurrent(state: State) -> list[list[np.ndarray | None]]:
    """Convolution and recurrence states of each recurrent layer."""
    caches = [leaf for leaf in leaves(state.caches) if type(leaf) is ArraysCache]
    return [[None if a is None else np.array(a) for a in cache.cache] for cache in caches]


def attention(state: State) -> list[np.ndarray]:
    """Keys and values that are part of the state."""
    caches = [leaf for leaf in leaves(state.caches) if type(leaf) is not ArraysCache]
    return [np.array(a[..., : c.offset, :]) for c in caches if c.offset for a in c.state[:2]]


def stepped(kind: str, tokens: list[int]) -> State:
    state = new_state(kind)
    for token in tokens:
        forward(state, [token])
    return state


def assert_close(state: State, fresh: State) -> None:
    """Recurrent states are equal to 1e-5 of the largest of their numbers, or of 1."""
    for own, other in zip(recurrent(state), recurrent(fresh), strict=True):
        for a, b in zip(own, other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.fixture
def trunk_runs(monkeypatch) -> list[int]:
    """Counts the rows of every run of a trunk."""
    runs: list[int] = []

    def count(family: type, name: str) -> None:
        original = getattr(family, name)

        def counted(self, tokens, cache):
            runs.append(tokens.shape[1])
            return original(self, tokens, cache)

        monkeypatch.setattr(family, name, counted)

    for family in {type(new_state(kind).family) for kind in HYBRIDS}:
        count(family, "forward")
        count(family, "prefill")
    return runs


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_rejection_at_every_position_of_blocks_of_every_length(kind, length, trunk_runs):
    fresh = [stepped(kind, PROMPT[:length] + ROWS[:keep]) for keep in range(len(ROWS) + 1)]
    state = stepped(kind, PROMPT[:length])
    before = recurrent(state)
    for rows in range(1, len(ROWS) + 1):
        for keep in range(rows + 1):
            mark = state.mark(rows)
            forward(state, ROWS[:rows])
            written = attention(state)
            trunk_runs.clear()
            state.rollback(mark, ROWS[:keep])
            assert trunk_runs == []
            assert state.length == length + keep
            assert_close(state, fresh[keep])
            for now, then in zip(attention(state), written, strict=length + keep > 0):
                np.testing.assert_array_equal(now, then[..., : length + keep, :])
            state.restore(mark)
            assert_same(recurrent(state), before)


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_replay_of_all_rows_gives_the_bits_the_forward_wrote(kind, length):
    state = stepped(kind, PROMPT[:length])
    mark = state.mark(len(ROWS))
    forward(state, ROWS)
    wrote = recurrent(state)
    state._replay(mark, len(ROWS))
    assert_same(recurrent(state), wrote)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_rounds_in_a_row_each_taken_back(kind):
    rng = np.random.default_rng(8)
    tokens = PROMPT[:2]
    state = run_prefill(new_state(kind), tokens)
    for _ in range(12):
        rows = rng.integers(0, VOCAB, size=2 + int(rng.integers(0, 5))).tolist()
        keep = int(rng.integers(0, len(rows)))
        mark = state.mark(len(rows))
        forward(state, rows)
        assert mark.tapes
        state.rollback(mark, rows[:keep])
        tokens = tokens + rows[:keep]
    assert_close(state, stepped(kind, tokens))
    assert_is_prefill_of(state, kind, tokens)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_second_rollback_to_the_same_mark(kind, trunk_runs):
    """As when a stop string cuts what was accepted: again without the trunk."""
    state = run_prefill(new_state(kind), PROMPT[:5])
    mark = state.mark(5)
    forward(state, BLOCK)
    state.rollback(mark, BLOCK[:4])
    trunk_runs.clear()
    state.rollback(mark, BLOCK[:1])
    assert trunk_runs == []
    assert_is_prefill_of(state, kind, PROMPT[:5] + BLOCK[:1])


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("way", ["kept one, then others", "restored, then others", "prefilled"])
def test_tapes_of_other_tokens_are_not_used(kind, way):
    state = run_prefill(new_state(kind), PROMPT[:5])
    mark = state.mark(8)
    kept = [9, 10, 11]
    if way == "kept one, then others":
        forward(state, BLOCK)
        state.rollback(mark, BLOCK[:1])
        kept = [BLOCK[0], *kept]
        forward(state, [9, 10, 11, 12])
    elif way == "restored, then others":
        forward(state, BLOCK)
        state.restore(mark)
        forward(state, [9, 10, 11, 12])
    else:
        run_prefill(state, [9])
        forward(state, [10, 11, 12])
    state.rollback(mark, kept)
    assert_is_prefill_of(state, kind, PROMPT[:5] + kept)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_on_one_trunk_do_not_mix(kind):
    one, two = run_prefill(new_state(kind), PROMPT[:5]), run_prefill(new_state(kind), PROMPT[:7])
    marks = one.mark(4), two.mark(5)
    forward(one, ROWS[:4])
    forward(two, BLOCK)
    one.rollback(marks[0], ROWS[:2])
    two.rollback(marks[1], BLOCK[:3])
    assert_is_prefill_of(one, kind, PROMPT[:5] + ROWS[:2])
    assert_is_prefill_of(two, kind, PROMPT[:7] + BLOCK[:3])


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in HYBRIDS])
def test_where_a_layer_has_no_tape_none_is_made(kind):
    state = run_prefill(new_state(kind), PROMPT)
    mark = state.mark(4)
    forward(state, ROWS[:4])
    assert not mark.tapes


# --- nothing is recorded in vain, or kept ---------------------------------------------------------


def tapes_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, Tape) for thing in gc.get_objects())


@pytest.mark.parametrize("kind", HYBRIDS)
def test_only_a_forward_that_can_be_taken_back_is_recorded(kind):
    state = run_prefill(new_state(kind), PROMPT)
    forward(state, ROWS)
    assert tapes_alive() == 0
    single = state.mark(1)
    forward(state, [3])
    forward(state, ROWS)  # not the first since the mark
    assert not single.tapes
    mark = state.mark(4)
    run_prefill(state, PROMPT)
    forward(state, ROWS)
    assert not mark.tapes
    over = state.mark(4)
    state.rollback(over, [])
    forward(state, ROWS)
    assert not over.tapes
    assert tapes_alive() == 0


@pytest.mark.parametrize("kind", HYBRIDS)
def test_rows_that_a_mask_leaves_out_are_not_recorded(kind):
    """A tape would not know of the mask."""
    mixer = mixers(kind)[0]
    x, mask = mx.random.normal((1, 4, 32)), mx.array([[False, True, True, True]])
    plain, watched = ArraysCache(2), ArraysCache(2)
    want = mixer(x, mask, plain)
    with recording({0: watched}) as tapes:
        got = mixer(x, mask, watched)
    assert tapes[0].x is None
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("keep", [0, 2, len(ROWS)])
def test_tapes_go_with_the_mark(kind, keep):
    state = run_prefill(new_state(kind), PROMPT)
    mark = state.mark(len(ROWS))
    forward(state, ROWS)
    assert set(mark.tapes) == set(mark.snapshots)
    state.rollback(mark, ROWS[:keep])
    del mark
    assert tapes_alive() == 0
    assert not any("tape" in vars(leaf) for leaf in leaves(state.caches))


def test_a_restored_mark_holds_no_tapes():
    """An error's traceback keeps the mark for as long as somebody keeps the error."""
    state = run_prefill(new_state(HYBRIDS[0]), PROMPT)
    mark = state.mark(len(ROWS))
    forward(state, ROWS)
    state.restore(mark)
    assert tapes_alive() == 0


def test_a_tape_does_not_outlive_what_was_interrupted():
    cache: Any = ArraysCache(2)
    with pytest.raises(KeyboardInterrupt), recording({0: cache}):
        raise KeyboardInterrupt
    assert not hasattr(cache, "tape")


# --- the trunk stays what it was ------------------------------------------------------------------


@pytest.mark.parametrize("kind", HYBRIDS)
def test_single_instances_are_changed_and_never_a_class(kind):
    mx.random.seed(1)
    untouched, trunk = MODELS[kind][0](), MODELS[kind][0]()
    trunk.update(untouched.parameters())
    calls = [stock.__call__ for stock in STOCK]
    State(family_of(trunk))
    State(family_of(trunk))
    assert [stock.__call__ for stock in STOCK] == calls
    assert any(type(module) in STOCK for module in untouched.modules())
    changed = [module for module in trunk.modules() if isinstance(module, STOCK)]
    assert changed
    for module in changed:
        assert type(module) not in STOCK
        assert type(module).__name__ == type(module).__mro__[2].__name__
    ids = mx.array([PROMPT])
    want = np.array(untouched(ids))
    for same in (trunk, copy.deepcopy(trunk)):
        np.testing.assert_array_equal(np.array(same(ids)), want)
        np.testing.assert_array_equal(np.array(same(ids, cache=same.make_cache())), want)


def test_a_trunk_quantised_since_is_taken_back_too():
    mx.random.seed(1)
    trunk = MODELS[HYBRIDS[0]][0]()
    State(family_of(trunk))
    nn.quantize(trunk, group_size=32, bits=8, class_predicate=lambda _, m: _packs(m))
    state, fresh = State(family_of(trunk)), State(family_of(trunk))
    mark = state.mark(4)
    forward(state, ROWS[:4])
    state.rollback(mark, ROWS[:2])
    for token in ROWS[:2]:
        forward(fresh, [token])
    assert mark.tapes
    assert_close(state, fresh)


def _packs(module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


# --- through the engine ---------------------------------------------------------------------------

REPEATING = [3, 17, 5, 3, 17, 29, 5, 3, 17]
LAWS = {"greedy": GREEDY, "sampled": PLAIN}


def request(kind: str, drafter: Any, law: str, depth: int, tokens: int = 40) -> Any:
    return new_sequence(
        trunk_of(kind), REPEATING, drafter, config=LAWS[law], depth=depth, seed=7, max_tokens=tokens
    )


def lookup() -> NgramDrafter:
    return NgramDrafter(shortest=1)


def finish(sequence: Any) -> Any:
    while sequence.finish_reason is None:
        engine.Engine(VOCAB).step([sequence])
        assert sequence.state.length == len(sequence.tokens) - 1
    return sequence


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_output_is_that_of_plain_decoding(kind, law, depth):
    plain = finish(request(kind, None, law, 0))
    drafted = finish(request(kind, lookup(), law, depth))
    same_or_near_tie(plain, drafted)
    assert drafted.stats.accepted[0] < drafted.stats.drafted[0]
    assert_is_prefill_of(drafted.state, kind, drafted.tokens[:-1])


@pytest.mark.parametrize("kind", HYBRIDS)
def test_nothing_of_a_round_is_left_when_it_is_over(kind, monkeypatch):
    block = BlockDrafter([ROWS[:4], ROWS[:4]])
    sequence = request(kind, block, "sampled", 4)
    stepper = engine.Engine(VOCAB)
    stepper.step([sequence])
    assert tapes_alive() == 0

    def failing(*args, **kwargs):
        raise ArithmeticError

    monkeypatch.setattr(engine, "verify", failing)
    with pytest.raises(ArithmeticError):
        stepper.step([sequence])
    assert sequence.error is not None
    assert tapes_alive() == 0


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_run_interrupted_at_every_mixer_goes_on_as_if_it_had_not_been(kind, monkeypatch):
    """In the prompt, in forwards and in rollbacks: after the n-th mixer has written its cache."""
    want = finish(request(kind, lookup(), "greedy", 3, tokens=8)).tokens
    seen = set()
    for after in range(1, 200):
        sequence = request(kind, lookup(), "greedy", 3, tokens=8)
        with monkeypatch.context() as patch:
            stop = Interrupt(patch, mixers(kind), after)
            try:
                finish(sequence)
            except KeyboardInterrupt as e:
                seen |= {frame.name for frame in traceback.extract_tb(e.__traceback__)}
        if stop.left > 0:
            break
        assert finish(sequence).tokens == want
    assert after < 199
    assert {"prefill", "record", "replay"} <= seen
