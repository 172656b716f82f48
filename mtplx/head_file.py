"""An MTP head on disk, in a directory of its own or beside its trunk's weights.

``mtp.safetensors`` holds ``MTPHead``'s parameters in bfloat16 and, if it drafts from a part of the
vocabulary, those ids as int32 ``draft_ids``; ``mtp_config.json`` holds ``HeadConfig``. Stock mlx-lm
reads ``model*.safetensors`` only, so it still loads a directory that both lie in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import fetch
from .checkpoint import HEAD_CONFIG, SIDECAR, read_safetensors
from .draft_vocabulary import DraftVocabulary
from .errors import ModelError, ModelFileError
from .provenance import Provenance, is_sha256, known_sha256, replacing
from .tokenizer import read_json

if TYPE_CHECKING:
    import mlx.core as mx

    from .families.base import HeadedFamily
    from .mtp_patch import MTPHead

FORMAT = 1
WEIGHTS, CONFIG = SIDECAR, HEAD_CONFIG
DRAFT_IDS = "draft_ids"
SHIPPED = Path(__file__).parent / "heads"


@dataclass(frozen=True)
class HeadConfig:
    """What ``mtp_config.json`` says.

    copy_bonus: see ``MTPHead``.  draft_ids: how many ids it drafts from, None for all.  trunk:
    {"bytes", "sha256"} of the trunk's weight files by name.  sha256: of ``mtp.safetensors``.
    mtplx: the version that wrote it.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    norm_eps: float
    embedding_first: bool
    levels: tuple[int, ...]
    copy_bonus: tuple[float, ...]
    draft_ids: int | None
    trunk: Mapping[str, Mapping[str, Any]]
    sha256: str
    mtplx: str

    def is_of(self, files: Sequence[Path]) -> bool:
        """Whether the head was trained on a trunk of these weight files, by whatever names.

        They are only read where their sizes are the same.
        """
        sizes = sorted(file.stat().st_size for file in files)
        if sizes != sorted(file["bytes"] for file in self.trunk.values()):
            return False
        return sorted(map(known_sha256, files)) == sorted(f["sha256"] for f in self.trunk.values())

    def check_trunk(self, folder: Path, files: Sequence[Path]) -> None:
        """Raises ``ModelError`` unless ``is_of``."""
        if not self.is_of(files):
            mine = _listed({name: file["sha256"] for name, file in self.trunk.items()})
            raise ModelError(
                f"the head in {folder} was trained on another trunk: {mine}; this one is"
                f" {_listed({file.name: known_sha256(file) for file in files})}. `--any-trunk`"
                " (any_trunk=True) uses it anyway, which can only be slow, never wrong;"
                " `--head none` goes without it"
            )


def _listed(hashes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} (sha256 {digest})" for name, digest in hashes.items())


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_trunk(value: Any) -> bool:
    files = list(value.values()) if isinstance(value, dict) else []
    return bool(files) and all(
        isinstance(f, dict) and f.keys() == {"bytes", "sha256"} and is_sha256(f["sha256"])
        and type(f["bytes"]) is int for f in files
    )  # fmt: skip


_IS_RIGHT: dict[str, Callable[[Any], bool]] = {
    "model_type": lambda v: isinstance(v, str),
    "hidden_size": _is_size,
    "vocab_size": _is_size,
    "norm_eps": lambda v: type(v) in (int, float) and 0 <= v < 1,
    "embedding_first": lambda v: isinstance(v, bool),
    "levels": lambda v: isinstance(v, list) and all(map(_is_size, v)) and len(set(v)) == len(v),
    "copy_bonus": lambda v: (
        isinstance(v, list) and all(type(x) is float and 0 <= x < 99 for x in v)
    ),
    "draft_ids": lambda v: v is None or _is_size(v),
    "trunk": _is_trunk,
    "sha256": is_sha256,
    "mtplx": lambda v: isinstance(v, str),
}


def read_config(folder: Path) -> HeadConfig:
    """The configuration of the head in a directory; ``ModelFileError`` naming what is wrong."""
    file = folder / CONFIG
    if folder.is_dir() and not file.exists():
        raise ModelFileError(
            f"{file} is missing: this is not the directory of a head that mtplx trained (one that a"
            " model carries is used with that model, without being named)", path=file,
        )  # fmt: skip
    config = read_json(file)
    version = config.pop("format", None)
    if version != FORMAT or type(version) is not int:
        raise ModelFileError(f"{file}: format {version!r}; mtplx reads {FORMAT}", path=file)
    for key in sorted(config.keys() ^ _IS_RIGHT.keys()):
        what = "is missing" if key in _IS_RIGHT else "is not a known key"
        raise ModelFileError(f"{file}: {key!r} {what}", path=file)
    for key, is_right in _IS_RIGHT.items():
        if not is_right(config[key]):
            raise ModelFileError(f"{file}: {key} cannot be {config[key]!r}", path=file)
    lists = {key: tuple(config[key]) for key in ("levels", "copy_bonus")}
    return HeadConfig(**config | lists)


def write_head(folder: Path, head: MTPHead, trunk: Any, provenance: Provenance) -> None:
    """Writes a head of ``trunk``: the weights, then the configuration, each whole or not at all.

    Raises ``ModelError`` for a head that does not fit the trunk or is not finite in bfloat16.
    """
    import mlx.core as mx

    from . import __version__
    from .mtp_patch import attach_head

    vocabulary = head.vocabulary
    family = attach_head(trunk, head).family
    stored = {name: v.astype(mx.bfloat16) for name, v in _parameters(head).items()}
    if bad := _not_finite(stored):
        raise ModelError(f"the head's {bad} is not finite: it is not written")
    if vocabulary is not None:
        stored[DRAFT_IDS] = mx.array(vocabulary.ids.astype(np.int32))
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as new:
        mx.save_safetensors(str(new), stored)
    config = {
        "format": FORMAT,
        "model_type": provenance.architecture,
        "hidden_size": family.hidden_size,
        "vocab_size": family.vocab_size,
        "norm_eps": head.norm.eps,
        "embedding_first": head.embedding_first,
        "levels": list(head.levels),
        "copy_bonus": list(map(float, head.copy_bonus)),
        "draft_ids": None if vocabulary is None else len(vocabulary.ids),
        "trunk": {
            file.name: {"bytes": file.stat().st_size, "sha256": provenance.sha256[file.name]}
            for file in provenance.files
        },
        "sha256": fetch.file_sha256(folder / WEIGHTS),
        "mtplx": __version__,
    }
    with replacing(folder / CONFIG) as new:
        new.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _parameters(head: MTPHead) -> dict[str, Any]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(head.parameters()))


def _not_finite(arrays: Mapping[str, mx.array]) -> str | None:
    import mlx.core as mx

    finite = {name: mx.isfinite(array).all() for name, array in arrays.items()}
    mx.eval(finite)
    return next((name for name in sorted(finite) if not finite[name].item()), None)


def read_head(
    folder: Path, trunk: Any, provenance: Provenance, *, any_trunk: bool = False
) -> MTPHead:
    """The head in a directory, for ``trunk``: in float32 on a CPU, else in the trunk's precision.

    Raises ``ModelFileError`` naming file and tensor for anything but what ``write_head`` writes,
    and ``ModelError`` for the head of another trunk unless ``any_trunk``; it must fit all the same.
    """
    import mlx.core as mx

    from .device import on_cpu

    config, file = read_config(folder), folder / WEIGHTS
    if not any_trunk:
        config.check_trunk(folder, provenance.files)
    head, family = fit_head(folder, config, trunk)
    if fetch.file_sha256(file) != config.sha256:
        raise ModelFileError(f"{file}: its sha256 is not the one in {CONFIG}", path=file)
    arrays: Any = mx.load(str(file))
    if config.draft_ids is not None:
        try:
            ids = np.array(arrays.pop(DRAFT_IDS))
            head.vocabulary = DraftVocabulary(ids, config.vocab_size)
        except ValueError as e:
            raise ModelFileError(
                f"{file}: tensor {DRAFT_IDS!r}: {e}", path=file, tensor=DRAFT_IDS
            ) from None
    dtype = mx.float32 if on_cpu() else family.embed(mx.zeros((1, 1), mx.int32)).dtype
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    if bad := _not_finite(arrays):
        raise ModelFileError(f"{file}: tensor {bad!r} is not finite", path=file, tensor=bad)
    head.load_weights(list(arrays.items()), strict=True)
    head.eval()
    mx.eval(head.parameters())
    return head


def fit_head(folder: Path, config: HeadConfig, trunk: Any) -> tuple[MTPHead, HeadedFamily]:
    """A head for ``trunk`` that the tensors in a directory fit, by its header; no weights in it."""
    from .mtp_patch import MTPHead

    family = _fitting_family(folder / CONFIG, config, trunk)
    head = MTPHead(
        config.hidden_size, config.norm_eps, family.new_layer(),
        embedding_first=config.embedding_first, levels=config.levels,
        copy_bonus=config.copy_bonus,
    )  # fmt: skip
    _check_tensors(folder / WEIGHTS, config, head)
    return head, family


def _fitting_family(file: Path, config: HeadConfig, trunk: Any) -> HeadedFamily:
    """The family of a trunk that the configuration fits."""
    from .mtp_patch import headed_family

    try:
        family = headed_family(trunk, config.levels)
    except ModelError as e:
        raise ModelFileError(f"{file}: {e}", path=file) from None
    for key in ("hidden_size", "vocab_size"):
        mine, its = getattr(config, key), getattr(family, key)
        if mine != its:
            raise ModelFileError(f"{file}: {key} is {mine}, the trunk's {its}", path=file)
    return family


def _check_tensors(file: Path, config: HeadConfig, head: MTPHead) -> None:
    """Names, shapes and types in the file's header are those of ``head``."""
    expected = {name: ("BF16", tuple(v.shape)) for name, v in _parameters(head).items()}
    if config.draft_ids is not None:
        expected[DRAFT_IDS] = ("I32", (config.draft_ids,))
    if not file.is_file():
        raise ModelFileError(f"{file} is missing", path=file)
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in read_safetensors(file)}
    for name in sorted(expected.keys() | stored.keys()):
        mine, its = expected.get(name), stored.get(name)
        if mine != its:
            what = f"is {its}, expected {mine}" if mine else "is extra"
            what = what if its else "is missing"
            raise ModelFileError(f"{file}: tensor {name!r} {what}", path=file, tensor=name)


def sidecar(path: Path) -> Path | None:
    """The directory of the head beside a model at ``path``, or None."""
    folder = path if path.is_dir() else path.parent
    return folder if (folder / CONFIG).exists() else None


def shipped(files: Sequence[Path]) -> Path | None:
    """The directory of the head that comes with mtplx for a trunk of these files, or None."""
    folders = sorted(file.parent for file in SHIPPED.glob(f"*/{CONFIG}"))
    return next((f for f in folders if read_config(f).is_of(files)), None)
