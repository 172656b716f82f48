"""ERNIE-4.5 with experts: a dense layer, and the trunk's own final norm behind it.

Checked against FastDeploy's description by the makers (ernie4_5_mtp.py): its head normalises with
the trunk's ``norm`` before the output head. vLLM's (ernie_mtp.py) has the same tensors, but no norm
there and zeros in the place of the first embedding; what was measured elsewhere favours the makers'
(docs/families.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .head import MTPHead
from .native import MOST_HEADS, NativeFamily, Weights

_PARTS = {"emb_norm": "enorm", "hidden_norm": "hnorm", "linear_proj": "fc", "block": "layer"}
_TABLE = (
    *(
        (f"model.mtp_{stored}.{i}.", f"heads.{i}.{own}.")
        for i in range(MOST_HEADS)
        for stored, own in _PARTS.items()
    ),
    ("model.mtp_", "unknown."),
)


class ErnieFamily(NativeFamily):
    """ERNIE-4.5 with experts; a deeper draft reads the normalised state, like the first one."""

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        return _TABLE

    def new_block(self, index: int) -> Any:
        """See ``NativeFamily.new_block``: without experts."""
        args = dataclasses.replace(self.args, moe_layer_start_index=1, moe_layer_end_index=0)
        return type(self.layers[0])(args, 0)

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``."""
        return MTPHead(
            self.hidden_size, self.norm_eps, self.new_block(index), bias="fc.bias" in names
        )

    def settle(self, weights: Weights) -> Weights:
        """See ``NativeFamily.settle``: the trunk's final norm is every head's."""
        heads = {name.split(".")[1] for name in weights if name.startswith("heads.")}
        return weights | {f"heads.{i}.norm.weight": self.body.norm.weight for i in heads}
