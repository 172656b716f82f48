"""Heads against what transformers' ``MtpModel`` gave for the same weights (``recorded``)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import recorded
from safetensors import safe_open

import mtplx
from mtplx.state import State


@pytest.mark.parametrize("name", recorded.NAMES)
def test_hidden_states_and_logits_of_every_head_are_the_recorded_ones(name, tmp_path):
    case = recorded.case(name)
    with safe_open(recorded.path(name), framework="numpy") as file:
        assert file.metadata()["weights"] == recorded.fingerprint(case), (
            "other weights: record anew"
        )
        hidden, logits = file.get_tensor("hidden"), file.get_tensor("logits")
    bundle = mtplx.load(case.write(tmp_path), weights="float32")
    tokens = recorded.PROMPT
    (own,) = State(bundle.attached.family).prefill(tokens[:-1])
    np.testing.assert_allclose(np.asarray(own), hidden, rtol=0, atol=1e-4)
    state = mx.array(hidden)
    assert len(logits) == len(bundle.head.heads)
    for depth, head in enumerate((bundle.attached, *bundle.attached.further)):
        rows = len(hidden) - depth
        state = head.forward(state[:rows], mx.array(tokens[1 + depth :]), head.new_cache())
        want = logits[depth, :rows]
        np.testing.assert_allclose(np.asarray(head.logits(state)), want, rtol=0, atol=1e-4)
