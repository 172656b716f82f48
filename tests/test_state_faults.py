"""States whose forward does not get to its end, and the pieces of a state."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from doubles import tiny_llama
from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet
from test_state import (
    BLOCK,
    PROMPT,
    assert_is_prefill_of,
    forward,
    new_state,
    run_prefill,
)
from test_state import no_compiler as no_compiler
from trunks import HYBRIDS, MODELS, VOCAB, WINDOW, trunk_of

from mtplx.families import family_of
from mtplx.families.opaque import OpaqueFamily
from mtplx.state import State

# --- a forward that does not get to its end -----------------------------------------------------


def layers(kind: str) -> list[Any]:
    return trunk_of(kind).layers


def mixers(kind: str) -> list[Any]:
    """What a rollback runs again where it does not run the trunk: nothing above them."""
    kinds = (GatedDeltaNet, Qwen3NextGatedDeltaNet, NemotronHMamba2Mixer)
    return [module for module in trunk_of(kind).modules() if isinstance(module, kinds)]


class Interrupt:
    """Replaces a module class's ``__call__``: raises after the n-th call has written its cache."""

    def __init__(self, monkeypatch, modules: list[Any], after: int):
        self.left = after
        mro = type(modules[0]).__mro__
        stock = next(kind for kind in mro if kind.__module__.startswith("mlx_lm.models"))
        original = stock.__call__

        def call(layer, *args, **kwargs):
            out = original(layer, *args, **kwargs)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(stock, "__call__", call)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("length", [3, WINDOW - 2, WINDOW + 3])
def test_restore_after_a_forward_that_stopped_half_way(kind, length, monkeypatch):
    state = run_prefill(new_state(kind), PROMPT[:length])
    mark = state.mark(3)
    with monkeypatch.context() as patch:
        Interrupt(patch, layers(kind), after=1)
        with pytest.raises(KeyboardInterrupt):
            state.forward(BLOCK[:3])
    state.restore(mark)
    assert_is_prefill_of(state, kind, PROMPT[:length])


@pytest.mark.parametrize("kind", MODELS)
def test_a_prefill_that_stopped_half_way_keeps_whole_chunks(kind, monkeypatch):
    """Two chunks are in; the third stops in its first layer: the state is that of two."""
    state = new_state(kind)
    with monkeypatch.context() as patch:
        Interrupt(patch, layers(kind), after=2 * len(layers(kind)) + 1)
        with pytest.raises(KeyboardInterrupt):
            run_prefill(state, PROMPT, chunk=5)
    assert state.length == 10
    run_prefill(state, PROMPT[state.length :], chunk=5)
    assert_is_prefill_of(state, kind, PROMPT)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("rotating", layers), ("cache list", layers), *((kind, mixers) for kind in HYBRIDS)],
)
def test_a_replay_that_stopped_half_way_leaves_the_mark(kind, parts, monkeypatch):
    """The rollback's own forward is interrupted: no half-written row may stay behind."""
    state = run_prefill(new_state(kind), PROMPT[: WINDOW + 1])
    mark = state.mark(4)
    forward(state, BLOCK[:4])
    with monkeypatch.context() as patch:
        Interrupt(patch, parts(kind), after=2)
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
