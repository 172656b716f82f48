"""What the contract of every family does not say of Nemotron-H."""

from __future__ import annotations

import pytest
from family_cases import CASES

import mtplx
from mtplx.errors import ModelError, ModelFileError

CASE = CASES["nemotron_h"]


def test_a_head_with_recurrent_layers_is_refused(tmp_path):
    weights = CASE.weights()
    mamba = {
        name.replace("backbone.layers.0", "mtp.layers.0"): value
        for name, value in weights.items()
        if name.startswith("backbone.layers.0.mixer.")
    }
    kept = {n: v for n, v in weights.items() if not n.startswith("mtp.layers.0.mixer.")}
    with pytest.raises(ModelError, match="'ME'"):
        mtplx.load(CASE.write(tmp_path, kept | mamba), weights="float32")


def test_without_a_pattern_it_is_attention_and_experts(tmp_path):
    path = CASE.write(tmp_path, mtp_hybrid_override_pattern=None)
    assert mtplx.load(path, weights="float32").head_source == "model"


def test_a_final_norm_on_another_sub_layer_is_named(tmp_path):
    weights = CASE.weights()
    weights["mtp.layers.0.final_layernorm.weight"] = weights["mtp.layers.0.norm.weight"]
    with pytest.raises(ModelFileError, match=r"layers\.0\.final_layernorm\.weight' is extra"):
        mtplx.load(CASE.write(tmp_path, weights), weights="float32")
