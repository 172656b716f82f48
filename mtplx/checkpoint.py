"""Checks a model directory (config.json and safetensors files) without building the model.

MLX's reader accepts safetensors files with duplicate or overlapping tensors, wrapped shapes and
trailing bytes, so every file first passes the strict Rust reader.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mtplx.errors import ModelError, ModelFileError
from mtplx.tokenizer import read_json

INDEX = "model.safetensors.index.json"
SIDECAR, HEAD_CONFIG = "mtp.safetensors", "mtp_config.json"
# Files of a head alone, which no index need list; those of heads that mtplx trained have a
# configuration and are read by ``head_file``.
_HEAD_FILES = ("mtp*.safetensors", "model-mtp*.safetensors", "model_mtp*.safetensors")
_REFUSED = (".bin", ".pt", ".pth", ".npz", ".ckpt", ".pkl")
GROUP_SIZES, BITS = (16, 32, 64, 128), (2, 3, 4, 5, 6, 8)  # what MLX packs
UNREADABLE = ("F4", "F8_E5M2")  # types that the format has and MLX has not
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a safetensors header describes it; ``dtype`` in the format's words (F32, U32)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checked directory: its configuration, weight files and every tensor in them.

    sidecar: the tensors of files beside the model's own, which hold a head.
    """

    path: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    sidecar: Mapping[str, StoredTensor] = field(default_factory=dict)

    @cached_property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Every tensor, those of the sidecar among them."""
        return {**self.tensors, **self.sidecar}

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the configuration."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    def quantisation(self) -> dict[str, str]:
        """Stored types by group of tensors, e.g. {"layers": "4-bit affine", "norms": "F16"}."""
        groups: dict[str, set[str]] = {}
        for name, tensor in self.tensors.items():
            stem, _, kind = name.rpartition(".")
            if kind in ("scales", "biases"):
                continue
            if len(tensor.shape) == 1:
                group = "norms" if "norm" in name else "vectors"
            else:
                group = (
                    "embedding"
                    if "embed" in stem
                    else "output"
                    if stem.endswith("lm_head")
                    else "layers"
                )
            groups.setdefault(group, set()).add(self._kind(stem, tensor))
        order = ("layers", "embedding", "output", "norms", "vectors")
        return {g: "/".join(sorted(groups[g])) for g in order if g in groups}

    def _kind(self, stem: str, tensor: StoredTensor) -> str:
        scales = self.tensors.get(f"{stem}.scales")
        if scales is None or tensor.dtype != "U32":
            return tensor.dtype
        mode = self.setting(stem, "mode", "affine")
        group = self.setting(stem, "group_size", 64)
        return f"{self._bits(stem, tensor)}-bit {mode} (groups of {group})"

    def setting(self, stem: str, key: str, default: Any) -> Any:
        """One quantisation setting of a module, by its stored name: its own, else the model's."""
        settings = self.config.get("quantization") or {}
        own = settings.get(stem)
        return (own if isinstance(own, dict) else settings).get(key, settings.get(key, default))

    def _bits(self, stem: str, tensor: StoredTensor) -> int:
        columns = self.stored[f"{stem}.scales"].shape[-1] * self.setting(stem, "group_size", 64)
        return max(1, tensor.shape[-1] * 32 // max(1, columns))

    def parameters(self) -> int:
        """Number of stored weights; packed words are counted as the weights they hold."""
        total = 0
        for name, tensor in self.stored.items():
            stem, _, kind = name.rpartition(".")
            if kind in ("scales", "biases") and f"{stem}.weight" in self.stored:
                continue
            scales = self.stored.get(f"{stem}.scales")
            size = math.prod(tensor.shape)
            total += (
                size * 32 // self._bits(stem, tensor) if scales and tensor.dtype == "U32" else size
            )
        return total

    def describe(self) -> str:
        """``quantisation`` in one line: "BF16 layers, BF16 embedding, BF16 norms"."""
        return ", ".join(f"{kind} {group}" for group, kind in self.quantisation().items())


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks everything but the tensor data.

    Raises ``ModelFileError`` naming file and tensor, ``ModelError`` for a model that needs code
    of its own.
    """
    config = _config(path)
    files = _weight_files(path)
    beside = _head_files(path)
    tensors = _tensors_of([file for file in files if file not in beside], {})
    sidecar = _tensors_of(beside, tensors)
    if (path / INDEX).is_file():
        _check_index(path / INDEX, tensors, sidecar)
    checkpoint = Checkpoint(path, config, files, tensors, sidecar)
    layers = checkpoint.text_config.get("num_hidden_layers") or 1
    if layers > len(tensors):
        raise ModelFileError(
            f"{path / 'config.json'}: num_hidden_layers is {layers!r}, with {len(tensors)} tensors",
            path=path / "config.json",
        )
    return checkpoint


def _tensors_of(
    files: Sequence[Path], known: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of files by name; none of them may be in ``known`` or in two files."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_safetensors(file):
            other = tensors.get(name) or known.get(name)
            if other is not None:
                raise ModelFileError(
                    f"tensor {name!r} is in {other.file.name} and again in {file}",
                    path=file, tensor=name,
                )  # fmt: skip
            tensors[name] = tensor
    return tensors


def _head_files(path: Path) -> list[Path]:
    """The files beside the model's own: those that the index names, and a head's sidecar."""
    listed = set(_weight_map(path / INDEX).values()) if (path / INDEX).is_file() else set()
    named = {path / name for name in listed if not fnmatch(name, "model*.safetensors")}
    found = {file for pattern in _HEAD_FILES for file in path.glob(pattern)}
    found = {file for file in found if file.name not in listed}
    if (path / HEAD_CONFIG).exists():
        found.discard(path / SIDECAR)
    return sorted(found | {file for file in named if file.is_file()})


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    config = read_json(file)
    # mlx-lm would import and run this Python file of the model's directory.
    if config.get("model_file") is not None:
        raise ModelError(
            f"{file}: the model asks to run code of its own ({config['model_file']!r}, key "
            "model_file); mtplx never runs code that comes with a model"
        )
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", str(config.get("model_type", ""))):
        raise ModelFileError(
            f"{file}: model_type is {config.get('model_type')!r}, not a name", path=file
        )
    names = config.get("architectures") or []
    if not isinstance(names, (str, list)) or not all(isinstance(n, str) for n in names):
        raise ModelFileError(f"{file}: architectures is {names!r}, not a list of names", path=file)
    for part in (config, config.get("text_config") or {}):
        _check_sizes(file, part)
    _check_quantisation(file, "quantization", config.get("quantization"))
    return config


def _check_quantisation(file: Path, key: str, settings: Any) -> None:
    """Group sizes and bits, the model's and each module's own, are those MLX can pack."""
    if settings is None:
        return
    if not isinstance(settings, dict):
        raise ModelFileError(f"{file}: {key} is no object", path=file)
    for name, allowed in (("group_size", GROUP_SIZES), ("bits", BITS)):
        if name in settings and settings[name] not in allowed:
            raise ModelFileError(
                f"{file}: {key} has {name} {settings[name]!r}, not one of {allowed}", path=file
            )
    for path, own in settings.items():
        if isinstance(own, dict):
            _check_quantisation(file, f"{key}.{path}", own)


def _check_sizes(file: Path, config: Any) -> None:
    """The sizes every family has are plausible numbers: MLX divides by them in native code."""
    if not isinstance(config, dict):
        raise ModelFileError(f"{file}: text_config is no object", path=file)
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 < value < 1 << 31):
            raise ModelFileError(f"{file}: {key} is {value!r}, not a possible size", path=file)
    if (config.get("num_attention_heads") or 1) > (config.get("hidden_size") or 1 << 31):
        raise ModelFileError(f"{file}: more num_attention_heads than hidden_size", path=file)


def _weight_files(path: Path) -> tuple[Path, ...]:
    files = tuple(sorted(path.glob("model*.safetensors")))
    if files:
        return files
    if (path / INDEX).is_file():
        shards = _weight_map(path / INDEX)
        first = min(shards.values(), default="?")
        raise ModelFileError(f"{path / first} is missing ({INDEX} names it)", path=path / first)
    refused = sorted(f.name for f in path.iterdir() if f.suffix in _REFUSED)
    if refused:
        raise ModelFileError(
            f"{path}: only safetensors weights are read (they hold no code); "
            f"found {', '.join(refused[:4])}", path=path / refused[0],
        )  # fmt: skip
    raise ModelFileError(f"{path}: no model*.safetensors in it", path=path)


def read_safetensors(file: Path) -> list[tuple[str, StoredTensor]]:
    """Checks one file with the strict reader; returns its tensors by name."""
    try:
        file.open("rb").close()  # the reader calls any file that cannot be opened a missing one
        with safe_open(file, framework="numpy") as f:
            views = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
            found = [
                (name, StoredTensor(file, view.get_dtype(), tuple(view.get_shape())))
                for name, view in views.items()
            ]
        twice = _duplicate_key(file)
    except SafetensorError as e:
        raise ModelFileError(f"{file}: not a valid safetensors file ({e})", path=file) from None
    except OSError as e:
        raise ModelFileError(f"{file}: cannot be read ({e})", path=file) from None
    if twice is not None:
        raise ModelFileError(f"{file}: tensor {twice!r} occurs twice", path=file, tensor=twice)
    return found


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise ModelFileError(f"{index}: has no weight_map of names to files", path=index)
    for shard in mapping.values():
        if not shard or Path(shard).name != shard:
            raise ModelFileError(f"{index}: {shard!r} is not the name of a file", path=index)
    return mapping


def _check_index(
    index: Path, tensors: Mapping[str, StoredTensor], sidecar: Mapping[str, StoredTensor]
) -> None:
    mapping = _weight_map(index)
    known = {**tensors, **sidecar}
    present = {tensor.file.name for tensor in known.values()}
    for name, shard in mapping.items():
        if shard not in present:
            raise ModelFileError(
                f"{index.parent / shard} is missing ({INDEX} puts tensor {name!r} there)",
                path=index.parent / shard, tensor=name,
            )  # fmt: skip
        stored = known.get(name)
        if stored is None or stored.file.name != shard:
            raise ModelFileError(
                f"{index.parent / shard}: tensor {name!r} is missing ({INDEX} puts it there)",
                path=index.parent / shard, tensor=name,
            )  # fmt: skip
    for name, tensor in tensors.items():
        if name not in mapping:
            raise ModelFileError(
                f"{tensor.file}: tensor {name!r} is not listed in {INDEX}: "
                "a stray file, or a wrong index", path=tensor.file, tensor=name,
            )  # fmt: skip


def _duplicate_key(file: Path) -> str | None:
    """A name that occurs twice in a header; the strict reader lets identical entries pass."""
    with file.open("rb") as f:
        header = f.read(int.from_bytes(f.read(8), "little"))
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in items]
        if len(set(keys)) != len(keys):
            twice.extend(k for k in keys if keys.count(k) > 1)

    json.loads(header, object_pairs_hook=pairs)
    return twice[0] if twice else None
