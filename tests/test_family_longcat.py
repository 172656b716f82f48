"""What the contract of every family does not say of LongCat-Flash."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from family_cases import CASES

import mtplx
from mtplx.errors import ModelFileError
from mtplx.state import State

PROMPT = [5, 40, 9, 33, 17, 60, 2, 8, 71]


def test_packed_parts_of_the_latent_are_computed_with_as_what_they_stand_for(tmp_path):
    case = CASES["longcat_flash_mlx"]
    stored, plain = case.weights(), case.weights()
    for part in ("embed_q", "unembed_out"):
        stem = f"model.mtp.layers.0.self_attn.{part}"
        packed = mx.quantize(mx.array(plain[f"{stem}.weight"]), group_size=32, bits=8)
        plain[f"{stem}.weight"] = np.asarray(mx.dequantize(*packed, group_size=32, bits=8))
        for kind, value in zip(("weight", "scales", "biases"), packed, strict=True):
            stored[f"{stem}.{kind}"] = np.asarray(value)
    settings = {"group_size": 32, "bits": 8}
    bundle = mtplx.load(case.write(tmp_path, stored, quantization=settings), weights="packed")
    (hidden,) = State(bundle.attached.family).prefill(PROMPT[:-1])
    out = bundle.attached.forward(hidden, mx.array(PROMPT[1:]), bundle.attached.new_cache())
    want = case.reference(
        case.numpy_weights(plain), case.config, np.asarray(hidden, np.float64), PROMPT[1:]
    )
    got = np.asarray(bundle.attached.logits(out))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("part", [slice(0, -1), np.s_[:, :-1]], ids=["rows", "columns"])
def test_a_joint_projection_of_another_shape_is_named(tmp_path, part):
    case, stem = CASES["longcat_flash"], "model.mtp.layers.0.self_attn."
    weights, name = case.weights(), f"{stem}kv_b_proj.weight"
    weights[name] = np.ascontiguousarray(weights[name][part])
    with pytest.raises(ModelFileError, match="expected") as caught:
        mtplx.load(case.write(tmp_path, weights), weights="float32")
    assert caught.value.tensor.startswith(stem)
