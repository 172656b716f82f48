"""What the contract of every family does not say of Step-3.5."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from family_cases import CASES
from mlx.utils import tree_flatten
from references.step3p5 import head_hidden

import mtplx
from mtplx.errors import ModelError
from mtplx.state import State

CASE = CASES["step3p5"]
PROMPT = [5, 40, 9, 33, 17, 60, 2, 8, 71]


def test_a_head_hands_on_what_comes_before_its_norm(tmp_path):
    attached = mtplx.load(CASE.write(tmp_path), weights="float32").attached
    weights = CASE.numpy_weights(CASE.weights())
    (hidden,) = State(attached.family).prefill(PROMPT)
    want = np.asarray(hidden, np.float64)
    for k, head in enumerate((attached, *attached.further)):
        tokens = PROMPT[k + 1 :]
        hidden = head.forward(hidden[: len(tokens)], mx.array(tokens), head.new_cache())
        want = head_hidden(k)(weights, CASE.config, want[: len(tokens)], tokens)
        np.testing.assert_allclose(np.asarray(hidden), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stem", ["", "transformer."])
def test_the_names_of_either_layout_are_read(tmp_path, stem):
    weights = {
        name.replace("transformer.shared_head", f"{stem}shared_head"): value
        for name, value in CASE.weights().items()
    }
    assert len(mtplx.load(CASE.write(tmp_path, weights), weights="float32").head.heads) == 3


def test_a_head_that_the_configuration_does_not_describe_is_refused(tmp_path):
    kinds = CASE.config["layer_types"][:4]
    with pytest.raises(ModelError, match="does not describe layer 4"):
        mtplx.load(CASE.write(tmp_path, layer_types=kinds), weights="float32")
    assert mtplx.load(tmp_path, weights="float32", head="none").head is None


def arrays_of(module):
    return {name: np.asarray(value) for name, value in tree_flatten(module.parameters())}


def test_norms_of_a_conversion_are_taken_as_they_are(tmp_path):
    raw = mtplx.load(CASE.write(tmp_path / "raw"), weights="float32")
    weights = {n: w + 1 if w.ndim == 1 else w for n, w in CASE.weights().items() if CASE.is_head(n)}
    path = CASE.write(tmp_path / "mlx", arrays_of(raw.trunk) | weights)
    made = mtplx.load(path, weights="float32")
    for part in ("trunk", "head"):
        want, got = (arrays_of(getattr(bundle, part)) for bundle in (raw, made))
        assert got.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)
