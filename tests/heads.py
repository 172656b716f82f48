"""Random MTP heads for the tiny models, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mtplx import fetch, head_file
from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.load import Bundle
from mtplx.mtp_patch import MTPHead, new_head


def random_head(bundle: Bundle, *, seed: int = 0, ids: Any = None, **form: Any) -> MTPHead:
    """A head that fits; ``ids`` are those it drafts from."""
    vocabulary = None if ids is None else DraftVocabulary(ids, 320)
    head = new_head(bundle.trunk, vocabulary=vocabulary, **form)
    rng = np.random.default_rng(seed)
    noise = lambda w: mx.array((0.2 * rng.standard_normal(w.shape)).astype(np.float32))  # noqa: E731
    head.update(tree_map(noise, head.parameters()))
    return head


def write(folder: Path, bundle: Bundle, **form: Any) -> MTPHead:
    """A random head in a directory."""
    head = random_head(bundle, **form)
    head_file.write_head(folder, head, bundle.trunk, bundle.provenance)
    return head


def parameters(head: MTPHead) -> dict[str, mx.array]:
    return dict(tree_flatten(head.parameters()))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change or (with ...) drop entries of mtp_config.json."""
    file = folder / head_file.CONFIG
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(folder: Path, **changes: Any) -> None:
    """Change or (with None) drop tensors of mtp.safetensors; the configuration has its new hash."""
    file = folder / head_file.WEIGHTS
    arrays = mx.load(str(file))
    arrays |= {name.replace("__", "."): value for name, value in changes.items()}
    mx.save_safetensors(str(file), {k: v for k, v in arrays.items() if v is not None})
    edit_config(folder, sha256=fetch.file_sha256(file))
