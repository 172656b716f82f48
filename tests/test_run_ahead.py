"""Greedy decoding starts the next forward before the host has judged: nothing may show."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from doubles import GREEDY, new_sequence, tiny_llama
from mlx_lm.models.cache import QuantizedKVCache

from mtplx import engine
from mtplx.drafters import NoDrafter
from mtplx.engine import Engine
from mtplx.families import family_of
from mtplx.sampler_config import SamplerConfig
from mtplx.state import State

VOCABULARY = 64
# Head size 8 is too small for a quantised cache.
WIDE = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4}


def ids(*tokens: int) -> mx.array:
    return mx.array([list(tokens)], mx.int32)


def fresh(kind: str) -> State:
    if kind == "quantised":
        trunk = tiny_llama(1, **WIDE)
        return State(family_of(trunk), [QuantizedKVCache(32, 8) for _ in trunk.layers])
    return State(family_of(tiny_llama(1)))


def prefilled(kind: str, tokens: list[int]) -> State:
    state = fresh(kind)
    for _ in state.prefill(tokens):
        pass
    return state


def logits(state: State, token: int) -> np.ndarray:
    return np.asarray(state.forward([token])[1])


@pytest.mark.parametrize("kind", ["plain", "quantised"])
@pytest.mark.parametrize("length", [5, 255, 256])
def test_a_right_guess_is_taken_over_and_a_wrong_one_leaves_no_trace(kind, length):
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, VOCABULARY, length)]
    for guess in (7, 8):
        state, plain = prefilled(kind, prompt), prefilled(kind, prompt)
        state.run_ahead(ids(guess))
        assert state.length == length
        assert all(cache.offset == length for cache in state.caches)
        assert np.array_equal(logits(state, 7), logits(plain, 7))
        assert np.array_equal(logits(state, 9), logits(plain, 9))
        assert [c.offset for c in state.caches] == [c.offset for c in plain.caches]


def test_whatever_else_changes_the_state_drops_the_guess():
    """A forward over the guessed id from another point must not be given the old result."""

    def restored(state):
        mark = state.mark(1)
        state.forward([3])
        state.run_ahead(ids(7))
        state.restore(mark)

    def rolled_back(state):
        mark = state.mark(2)
        state.forward([3, 4])
        state.run_ahead(ids(7))
        state.rollback(mark, [])

    def prefilled_further(state):
        state.run_ahead(ids(7))
        for _ in state.prefill([5]):
            pass
        mark = state.mark(1)
        state.restore(mark)

    def dropped(state):
        state.run_ahead(ids(7))
        state.drop_ahead()

    for change, tokens in (
        (restored, [1, 2]),
        (rolled_back, [1, 2]),
        (prefilled_further, [1, 2, 5]),
        (dropped, [1, 2]),
    ):
        state = prefilled("plain", [1, 2])
        change(state)
        assert state._ahead is None
        assert np.allclose(logits(state, 7), logits(prefilled("plain", tokens), 7), atol=1e-5)


def test_a_forward_that_fails_while_it_is_started_is_undone_by_restore(monkeypatch):
    state = prefilled("plain", [1, 2])
    mark = state.mark(1)
    state.forward([3])
    inner = state.family.forward

    def fails(*args):
        inner(*args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(state.family, "forward", fails)
        with pytest.raises(MemoryError):
            state.run_ahead(ids(7))
    state.restore(mark)
    assert [cache.offset for cache in state.caches] == [2, 2]
    assert np.array_equal(logits(state, 3), logits(prefilled("plain", [1, 2]), 3))


def test_caches_that_cannot_be_trimmed_never_run_ahead():
    kinds = ["sliding_attention", "full_attention"]
    state = State(family_of(tiny_llama(3, layer_types=kinds, sliding_window=8)))
    state.run_ahead(ids(7))
    assert state._ahead is None


@pytest.mark.parametrize("config", [GREEDY, SamplerConfig(temperature=0.0, logit_bias={5: 3.0})])
def test_the_engine_runs_ahead_only_where_the_guess_is_certain(config, monkeypatch):
    """Greedy without bias: every guess but the first round's is used; else there is none."""
    trunk = tiny_llama(2)
    seen: list[mx.array] = []
    used: list[bool] = []
    start, run = State.run_ahead, State.forward

    def run_ahead(self, guess):
        seen.append(guess)
        start(self, guess)

    def forward(self, tokens):
        used.append(self._ahead is not None)
        return run(self, tokens)

    monkeypatch.setattr(State, "run_ahead", run_ahead)
    monkeypatch.setattr(State, "forward", forward)
    sequence = new_sequence(
        trunk, [9, 4, 11], NoDrafter(), rule="coupled", depth=0, config=config, max_tokens=12
    )
    while sequence.finish_reason is None:
        Engine(VOCABULARY).step([sequence])
    rounds = sequence.stats.rounds
    assert sequence.state._ahead is None
    if config.logit_bias:
        assert not seen
    else:
        assert used == [False] + [True] * (rounds - 1)
        guesses = [int(np.asarray(guess)[0, 0]) for guess in seen]
        assert guesses == sequence.tokens[3 : 3 + len(guesses)]


def test_rounds_make_no_streams_of_their_own(monkeypatch):
    """On a CPU a stream is a thread that never ends."""
    made = []
    monkeypatch.setattr(engine, "_law_stream", cache(engine._law_stream.__wrapped__))
    new = mx.new_thread_local_stream
    monkeypatch.setattr(mx, "new_thread_local_stream", lambda d: made.append(d) or new(d))
    sequence = new_sequence(tiny_llama(1), [3, 1, 4], NoDrafter(), depth=0, max_tokens=12)
    while sequence.finish_reason is None:
        Engine(VOCABULARY).step([sequence])
    assert len(made) == 1
