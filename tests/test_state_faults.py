"""States whose forward does not get to its end, and the pieces of a state."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from doubles import tiny_llama
from test_state import (
    BLOCK,
    MODELS,
    PROMPT,
    VOCAB,
    WINDOW,
    assert_is_prefill_of,
    forward,
    new_state,
    run_prefill,
)

from mtplx.families import family_of
from mtplx.families.opaque import OpaqueFamily
from mtplx.state import State

# --- a forward that does not get to its end -----------------------------------------------------

LAYERS = {  # the layer class that the interruption is put into
    "plain": lambda trunk: type(trunk.layers[0]),
    "quantised": lambda trunk: type(trunk.layers[0]),
    "rotating": lambda trunk: type(trunk.layers[0]),
    "recurrent": lambda trunk: type(trunk.layers[0]),
    "gated delta + attention": lambda trunk: type(trunk.model.layers[0]),
    "recurrent + rotating": lambda trunk: type(trunk.layers[0]),
    "chunked": lambda trunk: type(trunk.layers[0]),
    "cache list": lambda trunk: type(trunk.layers[0]),
}


class Interrupt:
    """Replaces a layer class's ``__call__``: raises after the n-th call has written its cache."""

    def __init__(self, monkeypatch, layer_class, after: int):
        self.left = after
        original = layer_class.__call__

        def call(layer, *args, **kwargs):
            out = original(layer, *args, **kwargs)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(layer_class, "__call__", call)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("length", [3, WINDOW - 2, WINDOW + 3])
def test_restore_after_a_forward_that_stopped_half_way(kind, length, monkeypatch):
    state = run_prefill(new_state(kind), PROMPT[:length])
    mark = state.mark(3)
    with monkeypatch.context() as patch:
        Interrupt(patch, LAYERS[kind](state.family.trunk), after=1)
        with pytest.raises(KeyboardInterrupt):
            state.forward(BLOCK[:3])
    state.restore(mark)
    assert_is_prefill_of(state, kind, PROMPT[:length])


@pytest.mark.parametrize("kind", MODELS)
def test_a_prefill_that_stopped_half_way_keeps_whole_chunks(kind, monkeypatch):
    """Two chunks are in; the third stops in its first layer: the state is that of two."""
    state = new_state(kind)
    layers = len(state.family.trunk.layers)
    with monkeypatch.context() as patch:
        Interrupt(patch, LAYERS[kind](state.family.trunk), after=2 * layers + 1)
        with pytest.raises(KeyboardInterrupt):
            run_prefill(state, PROMPT, chunk=5)
    assert state.length == 10
    run_prefill(state, PROMPT[state.length :], chunk=5)
    assert_is_prefill_of(state, kind, PROMPT)


@pytest.mark.parametrize("kind", ["rotating", "gated delta + attention", "cache list"])
def test_a_replay_that_stopped_half_way_leaves_the_mark(kind, monkeypatch):
    """The rollback's own forward is interrupted: no half-written row may stay behind."""
    state = run_prefill(new_state(kind), PROMPT[: WINDOW + 1])
    mark = state.mark(4)
    forward(state, BLOCK[:4])
    with monkeypatch.context() as patch:
        Interrupt(patch, LAYERS[kind](state.family.trunk), after=2)
        with pytest.raises(KeyboardInterrupt):
            state.rollback(mark, BLOCK[:2])
    assert state.length == WINDOW + 1
    assert_is_prefill_of(state, kind, PROMPT[: WINDOW + 1])


# --- the pieces ---------------------------------------------------------------------------------


def test_hidden_states_are_those_the_output_head_reads():
    trunk = tiny_llama(3, vocab_size=VOCAB)
    state = State(family_of(trunk))
    (hidden,) = state.prefill(PROMPT[:4])
    more, logits = state.forward([9, 8])
    everything = trunk.model(mx.array([[*PROMPT[:4], 9, 8]]))[0]
    np.testing.assert_allclose(hidden, everything[:4], atol=1e-5)
    np.testing.assert_allclose(more, everything[4:], atol=1e-5)
    want = trunk(mx.array([[*PROMPT[:4], 9, 8]]))[0, 4:]
    np.testing.assert_allclose(logits, want, atol=1e-5)


def test_prefill_comes_in_chunks_that_add_up():
    trunk = tiny_llama(3, vocab_size=VOCAB)
    state = State(family_of(trunk))
    parts = list(state.prefill(PROMPT, chunk=6))
    assert [part.shape[0] for part in parts] == [6, 6, 6, 2]
    whole = State(family_of(trunk))
    (once,) = whole.prefill(PROMPT)
    np.testing.assert_allclose(mx.concatenate(parts), once, atol=1e-5)
    np.testing.assert_allclose(forward(state, [1]), forward(whole, [1]), atol=1e-4)


def test_a_trunk_without_a_known_family_hides_its_states():
    state = new_state("recurrent")
    assert isinstance(state.family, OpaqueFamily)
    assert list(state.prefill([1, 2, 3])) == [None]
    hidden, logits = state.forward([4, 5])
    assert hidden is None
    assert logits.shape == (2, VOCAB)
