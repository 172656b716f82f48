"""What is special to a model family: how its trunk is run and what its MTP layer is made of.

One file a family, a table by ``model_type``. A trunk that is not in the table still decodes, with
drafters that need no hidden state.
"""

from __future__ import annotations

from typing import Any

from .base import Family
from .deepseek import DeepSeekFamily, SparseFamily
from .dense import DenseFamily
from .ernie import ErnieFamily
from .exaone import ExaoneMoeFamily
from .glm4 import Glm4Family, Glm4LiteFamily
from .longcat import LongcatFamily
from .mimo import MiMoFamily, MiMoV2Family
from .nemotron_h import NemotronHFamily
from .opaque import OpaqueFamily
from .qwen import Qwen35Family, QwenNextFamily
from .step3p5 import Step35Family

__all__ = ["FAMILIES", "Family", "family_class", "family_of"]

FAMILIES: dict[str, type[Family]] = {
    "deepseek_v3": DeepSeekFamily,
    "deepseek_v32": SparseFamily,
    "ernie4_5_moe": ErnieFamily,
    "exaone_moe": ExaoneMoeFamily,
    "glm4_moe": Glm4Family,
    "glm4_moe_lite": Glm4LiteFamily,
    "glm_moe_dsa": SparseFamily,
    "llama": DenseFamily,
    "longcat_flash": LongcatFamily,
    "mimo": MiMoFamily,
    "mimo_v2_flash": MiMoV2Family,
    "mistral": DenseFamily,
    "nemotron_h": NemotronHFamily,
    "qwen2": DenseFamily,
    "qwen3": DenseFamily,
    "qwen3_5": Qwen35Family,
    "qwen3_5_moe": Qwen35Family,
    "qwen3_next": QwenNextFamily,
    "step3p5": Step35Family,
}


def family_class(model_type: str) -> type[Family]:
    """The family of a ``model_type``."""
    return FAMILIES.get(model_type, OpaqueFamily)


def family_of(trunk: Any, levels: tuple[int, ...] = ()) -> Family:
    """The family of an mlx_lm trunk, by its ``model_type``.

    levels: the layers whose outputs are wanted as features besides the final hidden state.
    """
    return family_class(getattr(trunk, "model_type", ""))(trunk, levels)
