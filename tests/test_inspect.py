"""The verdict of ``inspect``, and that it accounts for every stored tensor without reading one."""

from __future__ import annotations

import json
import re
import struct

import heads
import mlx.core as mx
import numpy as np
import pytest
import tiny
from family_cases import CASES
from family_cases.case import write_rest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import mtplx
from mtplx.cli import app
from mtplx.errors import ModelError
from mtplx.families import family_class
from mtplx.families.unused import reason_of, unused
from mtplx.inspection import inspect

each = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
CASE = CASES["qwen3_5"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def unread(monkeypatch):
    """Nothing is evaluated."""

    def refuse(*arrays):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(mx, "eval", refuse)


@each
def test_a_native_head_and_every_tensor(case, tmp_path, unread):
    path = case.write(tmp_path)
    info = inspect(path)
    assert (info.verdict, info.why, info.broken_tensor) == ("native MTP", "", None)
    assert (info.drafts, info.mtp, info.mtp_files) == (
        "mtp", "in model.safetensors", ("model.safetensors",)
    )  # fmt: skip
    assert info.mtp_heads == case.head_count
    assert info.tensors["head"] == sum(map(case.is_head, case.shapes))
    assert sum(info.tensors.values()) == len(case.shapes)
    assert info.family not in ("dense", "opaque")


@each
def test_a_checkpoint_without_its_heads_tensors(case, tmp_path, unread):
    weights = {name: w for name, w in case.weights().items() if not case.is_head(name)}
    path = case.write(tmp_path, weights)
    info = inspect(path)
    assert (info.verdict, info.drafts, info.mtp, info.mtp_heads) == ("AR only", "ngram", "none", 0)
    assert sum(info.tensors.values()) == len(weights)
    assert info.tensors["head"] == 0
    told = case.text_config.keys() & {"num_nextn_predict_layers", "mtp_num_hidden_layers"}
    assert ("mtplx convert" in info.why) == bool(told)


@each
def test_a_tensor_that_is_missing_extra_or_of_another_shape(case, tmp_path, unread):
    weights = case.weights()
    for of_head in (True, False):
        ends = ("k_proj.weight", "kv_a_proj_with_mqa.weight")
        name = next(n for n in weights if case.is_head(n) == of_head and n.endswith(ends))
        stem = name.rpartition(".")[0]
        changed = {
            "missing": {key: value for key, value in weights.items() if key != name},
            "extra": weights | {f"{stem}.strange": weights[name]},
            "shape": weights | {name: weights[name][:-1]},
        }
        for what, arrays in changed.items():
            info = inspect(case.write(tmp_path / f"{what} {of_head}", arrays))
            assert info.verdict == "broken", (what, of_head)
            assert stem.rpartition(".")[2] in (info.broken_tensor or info.why)
            assert info.drafts == "ngram"


def test_stray_mtp_tensors_of_a_llama_are_named(tmp_path, unread):
    for name in ("mtp.fc.weight", "model.mtp_layers.0.x", "model.layers.2.eh_proj.weight"):
        weights = tiny.tiny_weights(tiny.tiny_config())
        weights[name] = np.zeros(4, np.float32)
        info = inspect(tiny.write_directory(tmp_path / name, weights=weights))
        assert (info.verdict, info.broken_tensor) == ("broken", name)
        assert "is extra" in info.why


def test_what_the_trunk_ignores_is_told_with_its_reason(tmp_path, unread):
    extra = {
        f"model.visual.blocks.{i}.{part}.weight": np.zeros((4, 4), np.float32)
        for i in range(9) for part in ("attn.qkv", "mlp.fc1")
    }  # fmt: skip
    path = CASE.write(tmp_path / "a", CASE.weights() | extra)
    info = inspect(path)
    assert info.verdict == "native MTP"
    assert info.tensors["ignored"] == len(extra)
    assert info.ignored == {
        f"model.visual.blocks.*.{part}.weight": "vision, which mlx-lm's text model leaves out"
        for part in ("attn.qkv", "mlp.fc1")
    }
    weights = tiny.tiny_weights(tiny.tiny_config())
    copy = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    rotary = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32) for i in (0, 1)
    }
    info = inspect(tiny.write_directory(tmp_path / "b", weights=weights | copy | rotary))
    assert info.tensors == {"trunk": len(weights), "head": 0, "ignored": 3}
    assert info.ignored == {
        "lm_head.weight": "a copy of the embedding",
        "model.layers.*.self_attn.rotary_emb.inv_freq": (
            "rotary frequencies, which are computed anew"
        ),
    }


def test_a_head_of_a_family_that_has_none(tmp_path, unread):
    path = tiny.write_directory(tmp_path)
    save_file({"mtp.fc.weight": np.zeros(4, np.float32)}, path / "mtp.safetensors")
    info = inspect(path)
    assert (info.verdict, info.tensors["ignored"]) == ("AR only", 1)
    assert info.ignored == {"mtp.fc.weight": "no MTP head is known of a llama model"}


def test_a_head_that_mtplx_trained(tmp_path):
    path = tiny.write_directory(tmp_path / "d")
    stored = len(tiny.tiny_weights(tiny.tiny_config()))
    heads.write(path, mtplx.load(path))
    count = len(mx.load(str(path / "mtp.safetensors")))
    info = inspect(path)
    assert (info.verdict, info.drafts) == ("MTP head trained by mtplx", "mtp")
    assert info.tensors == {"trunk": stored, "head": count, "ignored": 0}
    assert info.mtp_files == ("mtp.safetensors",)
    heads.edit_weights(path, fc__weight=mx.zeros((64, 64), mx.bfloat16))
    info = inspect(path)
    assert (info.verdict, info.broken_tensor) == ("broken", "fc.weight")


def test_a_trained_head_comes_before_the_models_own(tmp_path, monkeypatch):
    kind = family_class("qwen3_5")
    monkeypatch.setattr(kind, "new_layer", lambda self: self.new_block(0))
    path = CASE.write(tmp_path / "d")
    heads.write(path, mtplx.load(path, head="none", weights="float32"))
    info = inspect(path)
    own = sum(map(CASE.is_head, CASE.shapes))
    assert info.verdict == "MTP head trained by mtplx"
    assert info.tensors["ignored"] == own
    assert set(info.ignored.values()) == {"the head that mtplx trained comes first"}


def test_a_gguf(tmp_path):
    info = inspect(tiny.write_gguf(tmp_path / "x.gguf"))
    stored = len(tiny.tiny_weights(tiny.tiny_config()))
    assert (info.verdict, info.family) == ("AR only", "dense")
    assert info.tensors == {"trunk": stored, "head": 0, "ignored": 0}


def test_forty_gigabytes_are_not_read(tmp_path):
    """The weights are a hole in a file; reading them would need memory that is not there."""
    config = tiny.tiny_config(hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
                              head_dim=128, num_key_value_heads=8, num_hidden_layers=6)  # fmt: skip
    small = tiny.tiny_weights(tiny.tiny_config(num_hidden_layers=6))
    h, sizes = config["hidden_size"], {64: 16384, 128: 53248, 32: 1024, 320: 320}
    header, at = {}, 0
    for name, value in small.items():
        shape = [sizes[n] for n in value.shape]
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    assert at > 38e9
    assert h == sizes[64]
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
    write_rest(tmp_path, config)
    info = inspect(tmp_path)
    assert (info.verdict, info.tensors["trunk"]) == ("AR only", len(small))


@pytest.mark.parametrize("error", ["other trunk", "no model"])
def test_what_cannot_be_judged_is_an_error(error, tmp_path):
    path = tiny.write_directory(tmp_path / "d")
    if error == "other trunk":
        heads.write(path, mtplx.load(tiny.write_directory(tmp_path / "o", seed=1)))
    else:
        (path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError):
        inspect(path)


# What a sanitize does with names; the tensors are of no use.


def stack(weights):
    """Stacks experts, renames a norm, needs a scale and drops the rest of its kind."""
    out = {name: value for name, value in weights.items() if name.startswith("model.")}
    parts = [weights[f"layers.{i}.w"] for i in range(3)]
    out["stacked"] = mx.stack(parts)
    out["norm"] = weights["old_norm"]
    if "fp8.scale_inv" in weights:
        out["fp8"] = weights["fp8"].astype(mx.bfloat16)
    return out


def test_what_is_renamed_stacked_or_looked_at_is_used():
    arrays = {
        name: mx.zeros((2, 2))
        for name in (
            "model.a", "old_norm", "fp8", "fp8.scale_inv", "left.over.0", "left.over.1",
            "another", *(f"layers.{i}.w" for i in range(5)),
        )
    }  # fmt: skip
    assert unused(stack, arrays, layers=3) == {
        "another": ["another"],
        "layers.3.w": ["layers.3.w"],
        "layers.4.w": ["layers.4.w"],
        "left.over.*": ["left.over.0", "left.over.1"],
    }
    assert reason_of("layers.3.w", 3) == "of a layer beyond the trunk's 3"
    assert unused(dict, arrays, layers=3) == {}


# The command


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "200"})


def test_the_command_says_it_and_ends_accordingly(tmp_path):
    extra = {"model.visual.a.weight": np.zeros(4, np.float32)}
    path = CASE.write(tmp_path / "good", CASE.weights() | extra)
    found = run("inspect", path)
    assert found.exit_code == 0, found.stderr
    for words in ("verdict", "native MTP", "head 15", "vision, which", "model.visual.a.weight"):
        assert words in found.stdout
    weights = CASE.weights()
    del weights["mtp.fc.weight"]
    path = CASE.write(tmp_path / "bad", weights)
    text, told = run("inspect", path), run("inspect", path, "--json")
    assert text.exit_code == told.exit_code == 1
    assert "'mtp.fc.weight' is missing" in text.stderr
    assert "broken" in text.stdout
    info = json.loads(told.stdout)
    assert (info["verdict"], info["broken_tensor"]) == ("broken", "mtp.fc.weight")


@pytest.mark.parametrize("draft", ["auto", "none"])
def test_generate_says_why_there_is_no_head(draft, tmp_path):
    weights = {name: w for name, w in CASE.weights().items() if not CASE.is_head(name)}
    path = CASE.write(tmp_path, weights)
    found = run("generate", "a", "-m", path, "-n", "4", "--draft", draft)
    assert found.exit_code == 0, found.stderr
    assert found.stderr.count("tells of 1 MTP head") == (draft == "auto")


@pytest.mark.parametrize(
    ("lie", "words"),
    [({"num_experts_per_tok": 99}, "kth 98"), ({"rope_theta": "x"}, r"rope\(\): incompatible")],
)
def test_a_configuration_that_no_layer_can_run_with_is_broken(lie, words, tmp_path, unread):
    found = inspect(CASES["glm4_moe"].write(tmp_path, **lie))
    assert found.verdict == "broken"
    assert re.search(words, found.why)
    assert "\n" not in found.why


def test_a_tensor_that_mlx_lm_takes_for_granted_is_named(tmp_path):
    case, name = CASES["glm4_moe"], "model.layers.1.mlp.experts.3.up_proj.weight"
    path = case.write(tmp_path, {n: w for n, w in case.weights().items() if n != name})
    found = inspect(path)
    assert (found.verdict, found.broken_tensor) == ("broken", name)
    assert found.why == f"{path}: tensor '{name}' is missing"
