"""Heads stored as layers behind the trunk's (DeepSeek, GLM): formats, copies and what is wrong."""

from __future__ import annotations

import formats
import mlx.core as mx
import numpy as np
import pytest
from family_cases import CASES
from family_cases.case import write_rest
from mlx.utils import tree_flatten

import mtplx
from mtplx.errors import ModelError, ModelFileError
from mtplx.state import State

PROMPT = [5, 40, 9, 33, 17, 60, 2, 8, 71]
PUBLISHED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
CONVERTED = ("deepseek_v3", "glm4_moe_two_heads_mlx", "glm4_moe_lite_mlx", "glm_moe_dsa_mlx")
KV_B = "model.layers.2.self_attn.kv_b_proj.weight"


def logits_of(bundle, hidden):
    attached = bundle.attached
    out = attached.forward(hidden, mx.array(PROMPT[1:]), attached.new_cache())
    return np.asarray(attached.logits(out), np.float64)


def hidden_of(bundle):
    (hidden,) = State(bundle.attached.family).prefill(PROMPT[:-1])
    return hidden.astype(mx.float32)


def is_matrix(name, weights):
    return weights[name].ndim > 1 and not name.endswith(("mlp.gate.weight", "kv_b_proj.weight"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", CONVERTED)
def test_packed_weights_are_computed_with_as_what_they_stand_for(name, bits, tmp_path):
    case = CASES[name]
    weights = case.weights()
    stored, plain = formats.packed(weights, lambda n: is_matrix(n, weights), bits)
    settings = {"group_size": 32, "bits": bits}
    path = case.write(tmp_path, stored, quantization=settings, quantization_config=settings)
    bundle = mtplx.load(path, weights="packed")
    kinds = {type(module).__name__ for _, module in bundle.head.named_modules()}
    assert {"QuantizedLinear", "QuantizedSwitchLinear"} <= kinds
    hidden = hidden_of(bundle)
    want = case.reference(
        case.numpy_weights(plain), case.text_config, np.asarray(hidden, np.float64), PROMPT[1:]
    )
    np.testing.assert_allclose(logits_of(bundle, hidden), want, rtol=0, atol=1e-4)
    widened = mtplx.load(path, weights="float32")
    np.testing.assert_allclose(logits_of(widened, hidden), want, rtol=0, atol=1e-4)


def test_packed_keys_and_values_are_split_as_they_are(tmp_path):
    case = CASES["deepseek_v3"]
    stored, plain = formats.packed(case.weights(), lambda name: name == KV_B, 4)
    bundle = mtplx.load(case.write(tmp_path, stored), weights="packed")
    attention = bundle.head.heads[0].layer.self_attn
    both = plain[KV_B].reshape(4, 40, 32)
    for module, want in (
        (attention.embed_q, both[:, :32].swapaxes(1, 2)), (attention.unembed_out, both[:, 32:]),
    ):  # fmt: skip
        np.testing.assert_allclose(np.asarray(module.weight), want, rtol=0, atol=1e-6)


def test_nvfp4_is_refused_in_words(tmp_path):
    case = CASES["glm_moe_dsa"]
    weights = case.weights()
    name = next(n for n in weights if case.is_head(n) and n.endswith("up_proj.weight"))
    weights[f"{name}_scale_2"] = np.ones(1, np.float32)
    path = case.write(tmp_path, weights)
    with pytest.raises(ModelError, match=r"NVFP4.*--head none"):
        mtplx.load(path, weights="float32")


@pytest.mark.parametrize("name", PUBLISHED)
def test_fp8_with_scales_of_blocks_is_what_bfloat16_makes_of_it(name, tmp_path):
    case = CASES[name]
    weights = case.weights()

    def chosen(stored):
        parts = ("proj.weight", "indexer.wq_b.weight", "indexer.wk.weight")
        return stored.endswith(parts) and "eh_proj" not in stored and "weights" not in stored

    codes, others, plain = formats.fp8(weights, chosen)
    assert any(case.is_head(stored) and len(codes[stored]) > formats.BLOCK for stored in codes)
    formats.write_fp8(tmp_path / "model.safetensors", codes, others)
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write_rest(tmp_path, {**case.config, "quantization_config": quantised})
    bundle = mtplx.load(tmp_path, weights="float32")
    hidden = hidden_of(bundle)
    want = case.reference(
        case.numpy_weights(plain), case.text_config, np.asarray(hidden, np.float64), PROMPT[1:]
    )
    np.testing.assert_allclose(logits_of(bundle, hidden), want, rtol=0, atol=1e-4)
    assert mtplx.generate(bundle, PROMPT, max_tokens=4).stats.tokens == 4


@pytest.mark.parametrize(("name", "own"), [("deepseek_v3", False), ("glm4_moe_lite", True)])
def test_an_embedding_and_output_of_its_own_are_kept_where_they_are_no_copies(name, own, tmp_path):
    case = CASES[name]
    head = mtplx.load(case.write(tmp_path), weights="float32").head
    names = {parameter for parameter, _ in tree_flatten(head.parameters())}
    assert {f"heads.0.{part}.weight" in names for part in ("embedding", "output")} == {own}


@pytest.mark.parametrize("stored", ["mlp.experts.5.up_proj.weight", "self_attn.kv_b_proj.weight"])
def test_a_tensor_that_does_not_fit_the_others_it_is_joined_with_is_named(stored, tmp_path):
    case = CASES["deepseek_v3"]
    name = f"model.layers.2.{stored}"
    weights = case.weights() | {name: case.weights()[name][:-1]}
    with pytest.raises(ModelFileError, match="expected") as caught:
        mtplx.load(case.write(tmp_path, weights), weights="float32")
    assert caught.value.tensor == name


@pytest.mark.parametrize("expert", [0, 5])
def test_an_expert_that_is_missing_is_named(expert, tmp_path):
    case = CASES["glm4_moe"]
    name = f"model.layers.2.mlp.experts.{expert}.up_proj.weight"
    weights = {stored: w for stored, w in case.weights().items() if stored != name}
    with pytest.raises(ModelFileError, match="is missing") as caught:
        mtplx.load(case.write(tmp_path, weights), weights="float32")
    assert caught.value.tensor == name


@pytest.mark.parametrize("told", [1, 3])
def test_heads_are_as_many_as_the_configuration_tells(told, tmp_path):
    case = CASES["deepseek_v3_two_heads_mlx"]
    path = case.write(tmp_path, num_nextn_predict_layers=told)
    with pytest.raises(ModelFileError, match="extra" if told == 1 else "missing") as caught:
        mtplx.load(path, weights="float32")
    assert caught.value.tensor.startswith(f"model.layers.{3 if told == 1 else 4}.")
