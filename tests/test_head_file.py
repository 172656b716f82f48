"""What a head's two files hold, and that nothing else is taken for a head."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import heads
import mlx.core as mx
import numpy as np
import pytest
import tiny

import mtplx
from mtplx import checkpoint, fetch, head_file
from mtplx.errors import ModelError, ModelFileError
from mtplx.families import FAMILIES
from mtplx.load import Bundle, load

FC = "fc.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return load(tiny.write_directory(tmp_path / "trunk"))


@pytest.fixture
def folder(tmp_path: Path, bundle: Bundle) -> Path:
    heads.write(tmp_path / "head", bundle, ids=range(0, 320, 2))
    return tmp_path / "head"


def read(folder: Path, bundle: Bundle, **options: Any) -> Any:
    return head_file.read_head(folder, bundle.trunk, bundle.provenance, **options)


def refused(folder: Path, bundle: Bundle, match: str, tensor: str | None = None) -> None:
    with pytest.raises(ModelFileError, match=match) as e:
        read(folder, bundle)
    assert e.value.tensor == tensor
    assert e.value.path is not None
    assert e.value.path.parent == folder
    assert str(e.value.path) in str(e.value)
    assert tensor is None or tensor in str(e.value)


# What is written and read


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"ids": [0, 5, 319]},
        {"levels": (1, 2)},
        {"levels": (2,), "embedding_first": False, "ids": range(320)},
    ],
)
def test_a_head_comes_back(tmp_path: Path, bundle: Bundle, form: dict[str, Any]) -> None:
    head = heads.write(tmp_path / "h", bundle, **form)
    found = read(tmp_path / "h", bundle)
    assert (found.levels, found.embedding_first) == (head.levels, head.embedding_first)
    assert found.norm.eps == head.norm.eps
    if "ids" in form:
        np.testing.assert_array_equal(found.vocabulary.ids, head.vocabulary.ids)
    else:
        assert found.vocabulary is None
    mine, its = heads.parameters(head), heads.parameters(found)
    assert mine.keys() == its.keys()
    for name, value in its.items():
        assert value.dtype == mx.float32
        assert mx.array_equal(value, mine[name].astype(mx.bfloat16).astype(mx.float32)), name
    assert not found.training


def test_what_the_files_say(tmp_path: Path, bundle: Bundle, folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"mtp.safetensors", "mtp_config.json"}
    stored = dict(checkpoint.read_safetensors(folder / "mtp.safetensors"))
    assert stored[FC].dtype == stored["layer.self_attn.q_proj.weight"].dtype == "BF16"
    assert (stored["draft_ids"].dtype, stored["draft_ids"].shape) == ("I32", (160,))
    trunk = tmp_path / "trunk" / "model.safetensors"
    assert json.loads((folder / "mtp_config.json").read_text()) == {
        "format": 1, "model_type": "llama", "hidden_size": 64, "vocab_size": 320,
        "norm_eps": 1e-5, "embedding_first": True, "levels": [], "copy_bonus": [], "draft_ids": 160,
        "trunk": {
            trunk.name: {"bytes": trunk.stat().st_size, "sha256": fetch.file_sha256(trunk)}
        },
        "sha256": fetch.file_sha256(folder / "mtp.safetensors"), "mtplx": mtplx.__version__,
    }  # fmt: skip


def test_the_same_head_is_the_same_file(tmp_path: Path, bundle: Bundle, folder: Path) -> None:
    heads.write(tmp_path / "again", bundle, ids=range(0, 320, 2))
    for name in ("mtp.safetensors", "mtp_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_head_keeps_the_trunk_s_rope_factors(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.gguf_tensors(config, tiny.tiny_weights(config))
    factors = np.linspace(1, 8, 8).astype("<f4")
    tensors.append(("rope_freqs.weight", (8,), 0, factors.tobytes()))
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny.gguf_bytes(tiny.gguf_metadata(config), tensors))
    bundle = load(path)
    heads.write(tmp_path / "h", bundle)
    found = read(tmp_path / "h", bundle)
    assert mx.array_equal(
        found.layer.self_attn.rope._freqs, bundle.trunk.layers[0].self_attn.rope._freqs
    )


def test_stock_mlx_lm_loads_a_trunk_with_a_sidecar(tmp_path: Path, bundle: Bundle) -> None:
    from mlx_lm.utils import load_model

    path = tmp_path / "trunk"
    before, _ = load_model(path)
    heads.write(path, bundle)
    after, _ = load_model(path)
    ids = mx.array([[3, 4, 5]])
    assert mx.array_equal(before(ids), after(ids))
    assert checkpoint.read_checkpoint(path).files == (path / "model.safetensors",)


@pytest.mark.parametrize("failing", ["mtp.safetensors", "mtp_config.json"])
def test_a_write_that_fails_leaves_nothing_half_written(
    bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == failing:
            raise OSError("no space left")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no space"):
        heads.write(folder, bundle, seed=1)
    assert {p.name for p in folder.iterdir()} == before.keys()
    assert (folder / failing).read_bytes() == before[failing]
    if failing == "mtp.safetensors":
        read(folder, bundle)
    else:  # new weights with an old configuration are not taken for a head
        refused(folder, bundle, "missing|sha256|extra", tensor="draft_ids")


def test_what_does_not_fit_or_is_not_finite_is_not_written(tmp_path: Path, bundle: Bundle) -> None:
    other = load(tiny.write_directory(tmp_path / "o", hidden_size=32))
    with pytest.raises(ModelError, match="hidden size"):
        head_file.write_head(
            tmp_path / "h", heads.random_head(other), bundle.trunk, bundle.provenance
        )
    head = heads.random_head(bundle)
    head.norm.weight = mx.array([float("nan")] * 64)
    with pytest.raises(ModelError, match=r"norm\.weight is not finite"):
        head_file.write_head(tmp_path / "h", head, bundle.trunk, bundle.provenance)
    assert not (tmp_path / "h").exists()


# What is refused: the configuration


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 2}, "format 2; mtplx reads 1"),
        ({"format": True}, "format True"),
        ({"format": ...}, "format None"),
        ({"levels": ...}, "'levels' is missing"),
        ({"lavels": []}, "'lavels' is not a known key"),
        ({"hidden_size": 32}, "hidden_size is 32, the trunk's 64"),
        ({"hidden_size": 64.0}, "hidden_size cannot be 64.0"),
        ({"vocab_size": 321}, "vocab_size is 321, the trunk's 320"),
        ({"vocab_size": -1}, "vocab_size cannot be -1"),
        ({"norm_eps": "1e-5"}, "norm_eps cannot be"),
        ({"norm_eps": float("nan")}, "norm_eps cannot be nan"),
        ({"embedding_first": 1}, "embedding_first cannot be 1"),
        ({"levels": [3]}, r"layers \[3\], the trunk has 2"),
        ({"levels": [0]}, "levels cannot be"),
        ({"levels": [1, 1]}, "levels cannot be"),
        ({"levels": 1}, "levels cannot be 1"),
        ({"draft_ids": 0}, "draft_ids cannot be 0"),
        ({"trunk": {}}, "trunk cannot be"),
        ({"trunk": {"a": {"bytes": 1, "sha256": "x"}}}, "trunk cannot be"),
        ({"trunk": {"a": "x"}}, "trunk cannot be"),
        ({"sha256": "0" * 63}, "sha256 cannot be"),
        ({"mtplx": None}, "mtplx cannot be None"),
        ({"model_type": 3}, "model_type cannot be 3"),
    ],
)
def test_configurations(folder: Path, bundle: Bundle, changes: dict[str, Any], match: str) -> None:
    heads.edit_config(folder, **changes)
    refused(folder, bundle, match)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_an_unreadable_configuration(folder: Path, bundle: Bundle, text: str) -> None:
    (folder / "mtp_config.json").write_bytes(text.encode("latin-1"))
    refused(folder, bundle, "JSON")


@pytest.mark.parametrize("name", ["mtp_config.json", "mtp.safetensors"])
def test_a_missing_file(folder: Path, bundle: Bundle, name: str) -> None:
    (folder / name).unlink()
    refused(folder, bundle, f"{name} is missing")


# What is refused: the weights


@pytest.mark.parametrize(
    ("tensor", "value", "match"),
    [
        (FC, None, "is missing"),
        ("fc.bias", mx.zeros(64, mx.bfloat16), "is extra"),
        (FC, mx.zeros((64, 64), mx.bfloat16), r"\(64, 64\)\), expected"),
        (FC, mx.zeros((64, 128)), "'F32'.*expected.*'BF16'"),
        (FC, mx.full((64, 128), float("nan"), mx.bfloat16), "not finite"),
        ("norm.weight", mx.full((64,), float("inf"), mx.bfloat16), "not finite"),
        ("draft_ids", None, "is missing"),
        ("draft_ids", mx.arange(0, 318, 2), "expected"),
        ("draft_ids", mx.arange(318, -2, -2), "ascending"),
        ("draft_ids", mx.zeros(160, mx.int32), "ascending"),
        ("draft_ids", mx.arange(2, 322, 2), r"within \[0, 320\)"),
        ("draft_ids", mx.arange(-2, 318, 2), "within"),
        ("draft_ids", mx.arange(0, 320, 2).astype(mx.int64), "I64"),
    ],
)
def test_tensors(folder: Path, bundle: Bundle, tensor: str, value: Any, match: str) -> None:
    heads.edit_weights(folder, **{tensor.replace(".", "__"): value})
    refused(folder, bundle, match, tensor)


def test_draft_ids_that_the_configuration_does_not_have(folder: Path, bundle: Bundle) -> None:
    heads.edit_config(folder, draft_ids=None)
    refused(folder, bundle, "is extra", "draft_ids")


def test_another_file_than_the_configuration_names(folder: Path, bundle: Bundle) -> None:
    file = folder / "mtp.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(folder, bundle, "its sha256 is not the one")


def test_every_truncation(folder: Path, bundle: Bundle) -> None:
    file = folder / "mtp.safetensors"
    data = file.read_bytes()
    for cut in [*range(0, 1200, 97), len(data) // 2, len(data) - 1]:
        file.write_bytes(data[:cut])
        refused(folder, bundle, "not a valid safetensors")
    file.write_bytes(data + b"\0")
    refused(folder, bundle, "not a valid safetensors")


# Another trunk


def test_another_trunk_is_refused_by_both_hashes(
    tmp_path: Path, bundle: Bundle, folder: Path
) -> None:
    other = load(tiny.write_directory(tmp_path / "o", seed=1))
    with pytest.raises(ModelError, match="--any-trunk") as e:
        read(folder, other)
    for provenance in (bundle.provenance, other.provenance):
        assert provenance.sha256["model.safetensors"] in str(e.value)
    assert read(folder, other, any_trunk=True).vocabulary is not None


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"intermediate_size": 64}])
def test_any_trunk_still_has_to_fit(
    tmp_path: Path, folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = load(tiny.write_directory(tmp_path / "o", **changes))
    with pytest.raises(ModelFileError, match=r"hidden_size is 64, the trunk's 32|expected"):
        read(folder, other, any_trunk=True)
    monkeypatch.delitem(FAMILIES, "llama")
    with pytest.raises(ModelFileError, match="no MTP head is known for models of type 'llama'"):
        read(folder, other, any_trunk=True)


def test_a_trunk_by_another_file_name_is_the_same_trunk(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "trunk"
    (path / "model.safetensors").rename(path / "model-of-mine.safetensors")
    read(folder, load(path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_elsewhere_than_on_a_cpu_it_has_the_trunk_s_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    bundle = load(tiny.write_directory(tmp_path / "t", dtype=dtype), weights="packed")
    head = heads.random_head(bundle)
    head_file.write_head(tmp_path / "h", head, bundle.trunk, bundle.provenance)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    found = heads.parameters(read(tmp_path / "h", bundle))
    assert {value.dtype for value in found.values()} == {getattr(mx, dtype)}


def test_weights_that_overflow_the_trunk_s_precision_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load(tiny.write_directory(tmp_path / "t", dtype="float16"), weights="packed")
    heads.write(tmp_path / "h", bundle)
    heads.edit_weights(tmp_path / "h", enorm__weight=mx.full((64,), 1e6, mx.bfloat16))
    read(tmp_path / "h", bundle)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    refused(tmp_path / "h", bundle, "not finite", "enorm.weight")
