"""Weights go into a module whole or not at all: every parameter has its tensor, no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .errors import ModelFileError

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn


def load_strictly(
    model: nn.Module,
    items: list[tuple[str, mx.array]],
    *,
    path: Path | None = None,
    checkpoint: Checkpoint | None = None,
    into: Any = None,
    stored_name: Callable[[str], str] = str,
) -> nn.Module:
    """``load_weights``: names, shapes and kinds equal the model's, or ``ModelFileError``.

    into: what is called in place of ``model.load_weights``.  stored_name: what a file calls a
    parameter, for the error.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    def fail(parameter: str, what: str) -> ModelFileError:
        name = stored_name(parameter)
        stored = checkpoint.stored.get(name) if checkpoint else None
        where = stored.file if stored else path or (checkpoint.path if checkpoint else None)
        return ModelFileError(f"{where}: tensor {name!r} {what}", path=where, tensor=name)

    expected, given = dict(tree_flatten(model.parameters())), dict(items)
    for name in sorted(given.keys() - expected.keys()):
        raise fail(name, "is extra: the model has no such parameter")
    for name in sorted(expected.keys() - given.keys()):
        raise fail(name, "is missing")
    for name, array in given.items():
        if array.shape != expected[name].shape:
            raise fail(name, f"has the shape {array.shape}, expected {expected[name].shape}")
        if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(
            expected[name].dtype, mx.floating
        ):
            raise fail(name, f"is of type {array.dtype}, expected {expected[name].dtype}")
    return (into or model.load_weights)(items, strict=True)
