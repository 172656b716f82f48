"""EXAONE-MoE: Qwen's names of a head under ``mtp.``, plain norms.

Checked against vLLM's description by the makers (exaone_moe.py, exaone_moe_mtp.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from . import tensors
from .head import MTPHead
from .native import NativeFamily, Weights
from .qwen import TABLE

_SLIDING = "sliding_attention"


class ExaoneMoeFamily(NativeFamily):
    """EXAONE-MoE: a layer with attention as ``mtp_layer_types`` says, or that of the first layer.

    vLLM gives it a dense MLP always; here the stored tensors tell.
    """

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        return TABLE

    @property
    def _kind(self) -> str:
        return (self.config.get("mtp_layer_types") or self.args.layer_types)[0]

    def new_block(self, index: int, experts: bool = False) -> Any:
        """See ``NativeFamily.new_block``; the layers' types behind it decide on its rotation."""
        args = dataclasses.replace(
            self.args,
            layer_types=[self._kind, *self.args.layer_types],
            is_moe_layer=[experts],
        )
        return type(self.layers[0])(args, 0)

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``."""
        windows = self.config.get("mtp_sliding_windows") or [self.args.sliding_window]
        block = self.new_block(index, experts="layer.mlp.gate.weight" in names)
        return MTPHead(
            self.hidden_size, self.norm_eps, block,
            window=windows[0] if self._kind == _SLIDING else None,
        )  # fmt: skip

    def settle(self, weights: Weights) -> Weights:
        """See ``NativeFamily.settle``."""
        bias = ".e_score_correction_bias"
        return {
            name.replace(f".mlp{bias}", f".mlp.gate{bias}"): value
            for name, value in tensors.stack_experts(weights).items()
        }
