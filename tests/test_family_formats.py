"""Packed heads are what their weights stand for; what cannot be read is refused with its name."""

from __future__ import annotations

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from family_cases import CASES
from family_cases.case import write_rest
from test_families import PROMPT, each, hidden_of

import mtplx
from mtplx.errors import ModelError, ModelFileError

GROUP = 32
KINDS = {"float32": "F32", "uint32": "U32", "uint8": "U8"}


def write(case, path, arrays, kinds=(), **config):
    """A directory with one file; kinds: the header's word for a tensor's type, if not its own."""
    path.mkdir(exist_ok=True)
    header, data = {}, []
    for name, value in arrays.items():
        value, kind = np.ascontiguousarray(value), dict(kinds).get(name)
        start = sum(map(len, data))
        header[name] = {
            "dtype": kind or KINDS[value.dtype.name],
            "shape": [*value.shape[:-1], value.shape[-1] * 2] if kind == "F4" else value.shape,
            "data_offsets": [start, start + value.nbytes],
        }
        data.append(value.tobytes())
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    file = path / "model.safetensors"
    file.write_bytes(b"".join([len(head).to_bytes(8, "little"), head, *data]))
    write_rest(path, dict(case.config) | config)
    return path


def matrices(case):
    """The head's matrices that a conversion packs: not routers, which stay as they are."""
    return [
        name
        for name, shape in case.shapes.items()
        if case.is_head(name) and re.search(r"(proj(\.\d+)?|\.fc)\.weight$", name)
        and len(shape) == 2 and shape[1] % GROUP == 0
    ]  # fmt: skip


def assert_logits(case, bundle, plain):
    """The first head's logits are the reference's with the weights ``plain``."""
    attached, hidden = bundle.attached, hidden_of(bundle, PROMPT)[:-1]
    out = attached.forward(hidden, mx.array(PROMPT[1:]), attached.new_cache())
    want = case.reference(
        case.numpy_weights(plain), case.text_config, np.asarray(hidden, np.float64), PROMPT[1:]
    )
    np.testing.assert_allclose(np.asarray(attached.logits(out)), want, rtol=0, atol=1e-4)


@each
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_head_is_what_its_weights_stand_for(case, tmp_path, bits):
    stored, plain = case.weights(), case.weights()
    names = matrices(case)
    assert names
    for name in names:
        packed, scales, biases = mx.quantize(mx.array(stored[name]), group_size=GROUP, bits=bits)
        back = mx.dequantize(packed, scales, biases, group_size=GROUP, bits=bits)
        stem = name.removesuffix(".weight")
        stored |= {name: np.asarray(packed), f"{stem}.scales": np.asarray(scales)}
        stored[f"{stem}.biases"], plain[name] = np.asarray(biases), np.asarray(back)
    settings = {"quantization": {"group_size": GROUP, "bits": bits}}
    path = write(case, tmp_path / "m", stored, **settings)
    assert_logits(case, mtplx.load(path, weights="float32"), plain)


def as_fp8(stored, names):
    """Stored bytes and block scales of matrices, and the bfloat16 that they stand for."""
    plain, kinds = dict(stored), {}
    for name in names:
        scale = np.full([-(-n // 128) for n in stored[name].shape], 1 / 64, np.float32)
        packed = mx.to_fp8(mx.array(stored[name]) * 64)
        back = (mx.from_fp8(packed, dtype=mx.bfloat16) / 64).astype(mx.float32)
        stored |= {name: np.asarray(packed), f"{name}_scale_inv": scale}
        plain[name], kinds[name] = np.asarray(back), "F8_E4M3"
    return plain, kinds


@each
def test_an_fp8_head_is_what_its_weights_stand_for(case, tmp_path):
    stored = case.weights()
    plain, kinds = as_fp8(stored, matrices(case))
    bundle = mtplx.load(write(case, tmp_path / "m", stored, kinds), weights="float32")
    assert_logits(case, bundle, plain)


def test_every_block_of_fp8_has_its_scale():
    from mtplx.families.tensors import plain_formats

    rng = np.random.default_rng(0)
    values, scale = rng.standard_normal((200, 300)), 2.0 ** rng.integers(-3, 4, (2, 3))
    packed = mx.to_fp8(mx.array(values.astype(np.float32)))
    (got,) = plain_formats(
        {"a.weight": packed, "a.weight_scale_inv": mx.array(scale.astype(np.float32))}
    ).values()
    spread = np.kron(scale, np.ones((128, 128)))[:200, :300]
    want = np.asarray(mx.from_fp8(packed, dtype=mx.float32)) * spread
    np.testing.assert_array_equal(np.asarray(got.astype(mx.float32)), want)


MIMO = CASES["mimo_1"]
HEAD = "model.mtp_layers.0.mlp.up_proj"


def test_fp8_scales_of_another_shape_are_named(tmp_path):
    stored = MIMO.weights()
    _, kinds = as_fp8(stored, [f"{HEAD}.weight"])
    stored[f"{HEAD}.weight_scale_inv"] = np.ones((2, 1), np.float32)
    with pytest.raises(ModelFileError, match="has the shape") as caught:
        mtplx.load(write(MIMO, tmp_path / "m", stored, kinds), weights="float32")
    assert caught.value.tensor == f"{HEAD}.weight_scale_inv"


def nvfp4(stored):
    """ModelOpt's four tensors of a matrix: two weights a byte, scales for 16, and two scalars."""
    rows, columns = stored[f"{HEAD}.weight"].shape
    stored[f"{HEAD}.weight"] = np.zeros((rows, columns // 2), np.uint8)
    stored[f"{HEAD}.weight_scale"] = np.zeros((rows, columns // 16), np.uint8)
    stored[f"{HEAD}.weight_scale_2"] = np.ones(1, np.float32)
    stored[f"{HEAD}.input_scale"] = np.ones(1, np.float32)
    return {f"{HEAD}.weight_scale": "F8_E4M3"}


def test_an_nvfp4_head_is_refused_and_can_be_left_out(tmp_path):
    stored = MIMO.weights()
    path = write(MIMO, tmp_path / "m", stored, nvfp4(stored))
    with pytest.raises(ModelError, match=r"NVFP4.*mlp\.up_proj.*--head none"):
        mtplx.load(path, weights="float32")
    assert mtplx.load(path, weights="float32", head="none").head is None


def test_types_that_mlx_does_not_read_are_named(tmp_path):
    stored = MIMO.weights()
    kinds = nvfp4(stored) | {f"{HEAD}.weight": "F4"}
    path = write(MIMO, tmp_path / "m", stored, kinds)
    with pytest.raises(ModelError, match=rf"{re.escape(HEAD)}\.weight.* F4 .*NVFP4"):
        mtplx.load(path, weights="float32")
