from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten

from mtplx import checkpoint, fetch
from mtplx.errors import ModelError, ModelFileError
from mtplx.inspection import inspect
from mtplx.load import load

NAME = "model.layers.1.mlp.up_proj.weight"
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


def test_auto_is_float32_on_a_cpu(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", encoding="Q4_1")
    assert mx.default_device().type == mx.DeviceType.cpu, "tests run on the CPU"
    assert load(path).provenance.runs == "float32, dequantised"
    assert load(path, weights="packed").provenance.runs == "Q4_1 packed, as stored"


def test_bundle_and_provenance(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf")
    head = object()
    bundle = load(str(path), head=head)
    assert bundle.head is head
    provenance = bundle.provenance
    assert (provenance.source, provenance.path) == (str(path), path)
    assert (provenance.architecture, provenance.runs) == ("llama", "float32, as stored")
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
                {"text_config": [1]}, {"quantization": {"group_size": 0, "bits": 4}}, {"num_hidden_layers": "2"}, {"hidden_size": ...},
                {"hidden_size": "x"}, {"rope_scaling": {"type": "nosuch"}}]
)  # fmt: skip
def test_configurations_that_do_not_build(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        load(edit(tiny.write_directory(tmp_path / "d"), **changes))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.npz", "model.pt"])
def test_other_weight_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tiny.write_directory(tmp_path / "d")
    (path / "model.safetensors").rename(path / name)
    with pytest.raises(ModelFileError, match=f"only safetensors.*{name}"):
        load(path)
    (path / name).unlink()
    with pytest.raises(ModelFileError, match=r"no model\*\.safetensors"):
        load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w | {"scales": w["scales"][:, :1]},
        lambda w: w | {"scales": mx.zeros((128, 3))},
        lambda w: w | {"scales": mx.zeros(())},
        lambda w: w | {"weight": w["weight"][:, :1]},
    ],
)
@pytest.mark.parametrize("weights", ["float32", "packed"])
def test_packed_tensors_that_do_not_fit(tmp_path: Path, change: Any, weights: str) -> None:
    path = tiny.write_directory(tmp_path / "d", quantise={"group_size": 32, "bits": 4})
    file, stem = path / "model.safetensors", NAME.removesuffix(".weight")
    arrays = mx.load(str(file))
    mine = {k: arrays.pop(f"{stem}.{k}") for k in ("weight", "scales", "biases")}
    mx.save_safetensors(str(file), arrays | {f"{stem}.{k}": v for k, v in change(mine).items()})
    with pytest.raises(ModelFileError, match="does not pack rows of 64|shape") as e:
        load(path, weights=weights)
    assert e.value.path == file
    assert e.value.tensor in (NAME, f"{stem}.scales", f"{stem}.biases")


def header(entries: Any, data: bytes) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


MALFORMED = {
    "empty": b"",
    "header too long": struct.pack("<Q", 2**63),
    "not JSON": header("{", b""),
    "truncated": header({"a": entry([2], 0, 8)}, b"\0" * 4),
    "trailing bytes": header({"a": entry([1], 0, 4)}, b"\0" * 8),
    "overlap": header({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12),
    "gap": header({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),
    "wrapped shape": header({"a": entry([2**62, 4], 0, 0)}, b""),
    "negative": header({"a": entry([-1], 0, 4)}, b"\0" * 4),
    "wrong size": header({"a": entry([3], 0, 8)}, b"\0" * 8),
    "duplicate": header(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4,
    ),
    "duplicate elsewhere": header(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        '"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"\0" * 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_safetensors(tmp_path: Path, case: str) -> None:
    path = tiny.write_directory(tmp_path / "d")
    file = path / "model.safetensors"
    file.write_bytes(MALFORMED[case])
    with pytest.raises(ModelFileError) as e:
        load(path)
    assert e.value.path == file
    assert str(file) in str(e.value)
    if case == "duplicate":
        assert e.value.tensor == "a"


def test_every_truncation_of_a_safetensors_header(tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "d", num_hidden_layers=1)
    file = path / "model.safetensors"
    data = file.read_bytes()
    cuts = [*range(0, 1500, 7), len(data) // 2, len(data) - 1]
    for n in cuts:
        file.write_bytes(data[:n])
        with pytest.raises(ModelFileError):
            checkpoint.read_safetensors(file)


def changed(tmp_path: Path, **arrays: Any) -> Path:
    weights: dict[str, Any] = tiny.tiny_weights(tiny.tiny_config())
    for name, value in arrays.items():
        weights[name.replace("__", ".")] = value
    weights = {k: v for k, v in weights.items() if v is not None}
    return tiny.write_directory(tmp_path / "d", weights=weights)


@pytest.mark.parametrize("weights", ["float32", "packed"])
@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (NAME, None, "is missing"),
        (NAME, np.zeros((64, 128), np.float32), r"shape \(64, 128\), expected \(128, 64\)"),
        (NAME, np.zeros(128 * 64, np.float32), "shape"),
        (NAME, np.zeros((128, 64), np.int32), "type"),
        ("model.layers.1.mlp.extra.weight", np.zeros((2, 2), np.float32), "is extra"),
        ("model.layers.2.mlp.up_proj.weight", np.zeros((128, 64), np.float32), "extra|built"),
    ],
)
def test_missing_extra_and_misshapen_tensors(
    tmp_path: Path, weights: str, name: str, value: Any, match: str
) -> None:
    with pytest.raises(ModelFileError, match=match) as e:
        load(changed(tmp_path, **{name.replace(".", "__"): value}), weights=weights)
    assert e.value.tensor == name
    assert name in str(e.value)
    where = tmp_path / "d" if value is None else tmp_path / "d" / "model.safetensors"
    assert e.value.path == where


def test_shards(tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "d", shards=3)
    middle = path / "model-00002-of-00003.safetensors"
    kept = middle.read_bytes()
    middle.unlink()
    with pytest.raises(ModelFileError, match="is missing") as e:
        load(path)
    assert e.value.path == middle

    middle.write_bytes(kept)
    extra = path / "model-extra.safetensors"
    extra.write_bytes(header({"other": entry([1], 0, 4)}, b"\0" * 4))
    with pytest.raises(ModelFileError, match="not listed") as e:
        load(path)
    assert (e.value.path, e.value.tensor) == (extra, "other")

    extra.write_bytes(kept)
    with pytest.raises(ModelFileError, match="again in") as e:
        load(path)
    assert e.value.tensor is not None

    extra.unlink()
    index = path / checkpoint.INDEX
    table = json.loads(index.read_text())
    table["weight_map"]["ghost"] = middle.name
    index.write_text(json.dumps(table))
    with pytest.raises(ModelFileError, match="'ghost' is missing") as e:
        load(path)
    assert (e.value.path, e.value.tensor) == (middle, "ghost")
    index.write_text("{}")
    with pytest.raises(ModelFileError, match="weight_map"):
        load(path)


def test_all_shards_missing(tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "d", shards=2)
    for file in path.glob("model-*.safetensors"):
        file.unlink()
    with pytest.raises(ModelFileError, match=r"model-00001-of-00002\.safetensors is missing"):
        load(path)


def test_a_sidecar_is_not_part_of_the_trunk(tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "d")
    (path / checkpoint.SIDECAR).write_bytes(header({"mtp.fc": entry([1], 0, 4)}, b"\0" * 4))
    load(path)
    assert inspect(path).mtp == "sidecar mtp.safetensors"


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
    assert json.loads(json.dumps(file.to_dict()))["runs"] == "float32, dequantised"
    assert directory.runs == "float32, as stored"


def test_inspect_sees_mtp_tensors(tmp_path: Path) -> None:
    for name in ("mtp.fc.weight", "model.mtp_layers.0.x", "model.layers.2.eh_proj.weight"):
        weights: dict[str, Any] = tiny.tiny_weights(tiny.tiny_config())
        weights[name] = np.zeros(4, np.float32)
        path = tiny.write_directory(tmp_path / name, weights=weights)
        assert inspect(path).mtp == "tensors in the model"


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
