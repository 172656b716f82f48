"""Qwen3-Next, Qwen3.5 and 3.6: a head under ``mtp.``, a full-attention layer in it.

As in vLLM's ``qwen3_next_mtp.py``: a deeper draft reads what comes after the head's norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import tensors
from .native import NativeFamily, Weights

TABLE = (
    ("mtp.fc.", "heads.0.fc."),
    ("mtp.pre_fc_norm_embedding.", "heads.0.enorm."),
    ("mtp.pre_fc_norm_hidden.", "heads.0.hnorm."),
    ("mtp.norm.", "heads.0.norm."),
    ("mtp.layers.0.", "heads.0.layer."),
    ("mtp.", "unknown."),
)


class QwenNextFamily(NativeFamily):
    """Qwen3-Next: norms are stored as w - 1, experts one by one or stacked."""

    zero_centred = True

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        return TABLE

    def new_block(self, index: int) -> Any:
        """See ``NativeFamily.new_block``: the first of the trunk's with full attention, anew."""
        place = next(i for i, layer in enumerate(self.layers) if not layer.is_linear)
        return type(self.layers[place])(self.args, place)

    def settle(self, weights: Weights) -> Weights:
        """See ``NativeFamily.settle``."""
        return tensors.stack_experts(tensors.split_gate_up(weights))


class Qwen35Family(QwenNextFamily):
    """Qwen3.5 and 3.6, dense or with experts: the language model is a part of the trunk."""

    count_key = "mtp_num_hidden_layers"

    @property
    def text(self) -> Any:
        """See ``TrunkFamily.text``."""
        return self.trunk.language_model
