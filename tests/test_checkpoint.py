"""Directories whose weight files are malformed, incomplete or do not fit the model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny

from mtplx import checkpoint
from mtplx.errors import ModelFileError
from mtplx.load import load

NAME = "model.layers.1.mlp.up_proj.weight"


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
    with pytest.raises(ModelFileError, match=r"does not pack rows of 64|shape") as e:
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


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/model.safetensors", ""])
def test_an_index_names_files_of_its_own_directory(tmp_path: Path, name: str) -> None:
    path = tiny.write_directory(tmp_path / "m", shards=2)
    table = json.loads((path / checkpoint.INDEX).read_text())
    table["weight_map"]["ghost"] = name
    (path / checkpoint.INDEX).write_text(json.dumps(table))
    with pytest.raises(ModelFileError, match="not the name of a file"):
        load(path)


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


def test_weights_that_cannot_be_opened_are_not_called_missing(tmp_path: Path) -> None:
    """A folder in their place; the same for files without permission, but for root."""
    path = tiny.write_directory(tmp_path / "d")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()
    with pytest.raises(ModelFileError, match=r"model\.safetensors: cannot be read \(.*directory"):
        load(path)
