from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten

from mtplx import cpu_layers, fetch, native
from mtplx.errors import ModelError, ModelFileError
from mtplx.inspection import inspect
from mtplx.load import load
from mtplx.native import KernelStatus

IDS = mx.array([list(range(3, 40))])


def logits(bundle: Any) -> np.ndarray:
    return np.array(bundle.trunk(IDS).astype(mx.float32))


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()}


# What loads


def test_gguf_equals_the_directory_with_the_same_weights(tmp_path: Path) -> None:
    from mlx_lm.models import llama

    directory = load(tiny.write_directory(tmp_path / "d"))
    file = load(tiny.write_gguf(tmp_path / "x.gguf"))
    np.testing.assert_array_equal(logits(directory), logits(file))
    assert type(directory.trunk) is type(file.trunk) is llama.Model
    assert "load_weights" not in vars(directory.trunk)
    assert directory.head is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_gguf_forms(tmp_path: Path, tied: bool, version: int) -> None:
    kw: dict[str, Any] = {"tie_word_embeddings": tied, "seed": 3}
    file = load(tiny.write_gguf(tmp_path / "x.gguf", version=version, align=64, **kw))
    np.testing.assert_array_equal(
        logits(load(tiny.write_directory(tmp_path / "d", **kw))), logits(file)
    )


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_packed_gguf_agrees_with_float32(tmp_path: Path, encoding: str) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", encoding=encoding)
    plain, packed = load(path, weights="float32"), load(path, weights="packed")
    # As stored, the embedding and the products round to 16 bits.
    tolerance = 0.15 if encoding == "BF16" else 0.05
    np.testing.assert_allclose(logits(packed), logits(plain), atol=tolerance)
    quantised = isinstance(packed.trunk.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert quantised == encoding.startswith("Q")
    assert plain.provenance.parameters == packed.provenance.parameters == 94_528


def test_biases_are_reordered_with_their_rows(tmp_path: Path) -> None:
    config = tiny.tiny_config(attention_bias=True, mlp_bias=True)
    weights = tiny.tiny_weights(config)
    rng = np.random.default_rng(1)
    for name in [n for n in weights if "_proj" in n]:
        bias = name.replace(".weight", ".bias")
        weights[bias] = rng.standard_normal(weights[name].shape[0]).astype(np.float32)
    kw: dict[str, Any] = {"weights": weights, "attention_bias": True, "mlp_bias": True}
    directory = load(tiny.write_directory(tmp_path / "d", **kw))
    file = load(tiny.write_gguf(tmp_path / "x.gguf", **kw))
    np.testing.assert_array_equal(logits(directory), logits(file))


def test_rope_factors_equal_llama3_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    directory = load(tiny.write_directory(tmp_path / "d", rope_scaling=scaling))
    periods = np.array(directory.trunk.layers[0].self_attn.rope._freqs)
    factors = periods / 10000.0 ** (np.arange(0, 16, 2) / 16)
    assert factors.max() > 7.9
    config = tiny.tiny_config()
    tensors = tiny.gguf_tensors(config, tiny.tiny_weights(config))
    tensors.append(("rope_freqs.weight", (8,), 0, factors.astype("<f4").tobytes()))
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny.gguf_bytes(tiny.gguf_metadata(config), tensors))
    file = load(path)
    np.testing.assert_allclose(logits(file), logits(directory), atol=1e-4)
    plain = load(tiny.write_gguf(tmp_path / "y.gguf"))
    assert np.abs(logits(plain) - logits(file)).max() > 0.01


@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_directory_forms(tmp_path: Path, form: str, shards: int) -> None:
    path = tiny.write_directory(tmp_path / "d", dtype=form, shards=shards)
    plain, stored = load(path, weights="float32"), load(path, weights="packed")
    kinds = {v.dtype for _, v in tree_flatten(plain.trunk.parameters())}
    assert kinds == {mx.float32}
    assert {v.dtype for _, v in tree_flatten(stored.trunk.parameters())} == {getattr(mx, form)}
    want = mx.array(tiny.tiny_weights(tiny.tiny_config())["model.norm.weight"])
    want = want.astype(getattr(mx, form)).astype(mx.float32)
    assert mx.array_equal(plain.trunk.model.norm.weight, want)
    assert len(plain.provenance.files) == shards


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_directory(tmp_path: Path, bits: int) -> None:
    path = tiny.write_directory(
        tmp_path / "d", dtype="float16", quantise={"group_size": 32, "bits": bits}
    )
    packed, plain = load(path, weights="packed"), load(path, weights="float32")
    assert isinstance(packed.trunk.model.embed_tokens, nn.QuantizedEmbedding)
    assert type(plain.trunk.model.embed_tokens) is nn.Embedding
    assert type(plain.trunk.layers[0].mlp.up_proj) is nn.Linear
    np.testing.assert_allclose(logits(packed), logits(plain), atol=0.2)
    assert f"{bits}-bit affine (groups of 32) layers" in packed.provenance.quantisation
    assert plain.provenance.parameters == packed.provenance.parameters == 94_528
    assert inspect(path).parameters == 94_528


def test_dequantised_layers_keep_their_bias(tmp_path: Path) -> None:
    config = tiny.tiny_config(attention_bias=True)
    weights = tiny.tiny_weights(config)
    for name in [n for n in weights if "self_attn" in n]:
        weights[name.replace(".weight", ".bias")] = np.ones(weights[name].shape[0], np.float32)
    kw: dict[str, Any] = {"quantise": {"group_size": 32, "bits": 8}, "weights": weights}
    path = tiny.write_directory(tmp_path / "d", attention_bias=True, **kw)
    np.testing.assert_allclose(
        logits(load(path, weights="packed")), logits(load(path, weights="float32")), atol=1e-3
    )


def test_auto_is_float32_on_a_cpu_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", encoding="Q4_1")
    assert mx.default_device().type == mx.DeviceType.cpu, "tests run on the CPU"
    for module in (cpu_layers, native):
        monkeypatch.setattr(module, "status", lambda: KernelStatus(reason="not built"))
    slow = "float32, dequantised; no CPU kernels (not built): slower, through MLX"
    assert load(path).provenance.runs == slow
    assert load(path, weights="packed").provenance.runs == "Q4_1 packed, as stored"


@pytest.mark.skipif(native.status().native is None, reason="no CPU kernels")
def test_auto_is_the_stored_weights_on_a_cpu_with_kernels(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", encoding="Q4_1")
    bundle = load(path)
    runs = f"Q4_1 packed, as stored; {native.describe()}"
    assert bundle.provenance.runs == runs == inspect(path).runs
    assert isinstance(bundle.trunk.model.embed_tokens, cpu_layers.PackedEmbedding)
    ids = mx.array([[5, 6, 7]])
    plain = load(path, weights="float32").trunk(ids)
    assert mx.allclose(bundle.trunk(ids), plain, rtol=1e-4, atol=1e-3)


def test_bundle_and_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "cache"))
    path = tiny.write_gguf(tmp_path / "x.gguf")
    bundle = load(str(path))
    provenance = bundle.provenance
    assert (provenance.source, provenance.path) == (str(path), path)
    assert provenance.architecture == "llama"
    assert provenance.runs.startswith("float32, as stored")
    assert provenance.config["hidden_size"] == 64
    assert provenance.sha256 == {"x.gguf": fetch.file_sha256(path)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        bundle.head = None  # type: ignore[misc]


def test_weights_argument_is_checked() -> None:
    with pytest.raises(ValueError, match="float16"):
        load(weights="float16")


# What is refused


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="known names are smollm2"):
        load("no-such-model")
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "none.gguf")
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(ModelFileError, match="directory with safetensors"):
        load(other)
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        load(tmp_path)


def edit(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    path = edit(tiny.write_directory(tmp_path / "d"), model_file="mine.py")
    (path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match=r"mine\.py.*never runs code"):
        load(path)
    edit(path, model_file=..., model_type="mine", auto_map={"AutoModel": "mine.Model"})
    with pytest.raises(ModelError, match=r"no model type .mine..*auto_map"):
        load(path)
    assert not (tmp_path / "ran").exists()
    # A class that mlx-lm has itself does not need the model's code: it is ignored.
    load(edit(path, model_type="llama"))


@pytest.mark.parametrize("kind", ["nosuch", "../llama", "base", "", None, 3])
def test_model_types_that_are_none(tmp_path: Path, kind: Any) -> None:
    path = edit(tiny.write_directory(tmp_path / "d"), model_type=kind)
    with pytest.raises(ModelError, match=r"model[_ ]type"):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_unreadable_config(tmp_path: Path, text: str) -> None:
    path = tiny.write_directory(tmp_path / "d")
    (path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load(path)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 10**9}, {"hidden_size": True}, {"vocab_size": 0},
                {"num_attention_heads": 128}, {"intermediate_size": 3}, {"architectures": 3},
                {"text_config": [1]}, {"quantization": {"group_size": 0, "bits": 4}},
                {"num_hidden_layers": "2"}, {"hidden_size": ...}, {"hidden_size": "x"},
                {"rope_scaling": {"type": "nosuch"}}]
)  # fmt: skip
def test_configurations_that_do_not_build(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        load(edit(tiny.write_directory(tmp_path / "d"), **changes))


# inspect


def test_inspect(tmp_path: Path) -> None:
    file = inspect(tiny.write_gguf(tmp_path / "x.gguf", encoding="Q8_0"))
    directory = inspect(tiny.write_directory(tmp_path / "d", tie_word_embeddings=False))
    assert (file.layers, file.hidden_size, file.heads, file.kv_heads) == (2, 64, 4, 2)
    assert (file.vocab_size, file.context, file.parameters) == (320, 512, 94_528)
    assert (file.format, file.architecture, file.mtp) == ("gguf", "llama", "none")
    assert file.quantisation == {"layers": "Q8_0", "embedding": "Q8_0", "norms": "F32"}
    assert file.tied_embeddings
    assert not directory.tied_embeddings
    assert file.chat_template
    assert directory.chat_template
    assert file.file_bytes == (tmp_path / "x.gguf").stat().st_size
    assert json.loads(json.dumps(file.to_dict()))["runs"] == file.runs
    assert directory.runs.startswith("float32, as stored")


def test_inspect_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="mtplx pull"):
        inspect("SmolLM2-135M-Instruct")
    assert names(tmp_path) == set()


# The default model


@pytest.mark.model
def test_default_model(default_model_path: Path) -> None:
    from mlx_lm.generate import generate_step

    bundle = load("SmolLM2-135M-Instruct")
    assert bundle.provenance.path == default_model_path
    assert bundle.provenance.quantisation == "Q4_1 layers, Q8_0 embedding, F32 norms"
    assert bundle.provenance.parameters == 134_515_008
    ids = bundle.tokenizer.encode("The capital of France is")
    assert ids == [504, 3575, 282, 4649, 314]
    steps = generate_step(mx.array(ids), bundle.trunk, max_tokens=4)
    assert "Paris" in bundle.tokenizer.decode([int(t) for t, _ in steps])
    assert inspect("smollm2-135m-instruct").layers == 30
