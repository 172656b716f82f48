"""What is special to a model family: how its trunk is run and what its MTP layer is made of.

One file a family, a table by ``model_type``. A trunk that is not in the table still decodes, with
drafters that need no hidden state.
"""

from __future__ import annotations

from typing import Any

from .base import Family
from .dense import DenseFamily
from .opaque import OpaqueFamily

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, type[Family]] = {
    "llama": DenseFamily,
    "mistral": DenseFamily,
    "qwen2": DenseFamily,
    "qwen3": DenseFamily,
}


def family_of(trunk: Any, levels: tuple[int, ...] = ()) -> Family:
    """The family of an mlx_lm trunk, by its ``model_type``.

    levels: the layers whose outputs are wanted as features besides the final hidden state.
    """
    return FAMILIES.get(getattr(trunk, "model_type", ""), OpaqueFamily)(trunk, levels)
