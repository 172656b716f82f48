"""MiMo and MiMo-V2-Flash: heads that read the trunk's hidden state before its final norm.

Checked against vLLM's (mimo.py, mimo_mtp.py) and SGLang's (mimo_v2_flash_nextn.py,
multi_layer_eagle_worker.py) descriptions, to which the makers contributed (docs/families.md). Both
serve the state before the norm: vLLM's MiMo model returns it, SGLang asks for it by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .head import MTPHead
from .native import MOST_HEADS, NativeFamily


def _table(stem: str, names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Rows for heads ``stem``.0, .1, ...; what ``names`` lacks is the decoder layer's."""
    rows = [
        (f"{stem}.{i}.{stored}", f"heads.{i}.{own}")
        for i in range(MOST_HEADS)
        for stored, own in (*names.items(), ("", "layer."))
    ]
    return (*rows, (f"{stem}.", "unknown."))


_MIMO = _table(
    "model.mtp_layers",
    {
        "token_layernorm.": "enorm.",
        "hidden_layernorm.": "hnorm.",
        "input_proj.": "fc.",
        "final_layernorm.": "norm.",
    },
)
_MIMO_V2 = _table(
    "model.mtp.layers",
    {
        "enorm.": "enorm.",
        "hnorm.": "hnorm.",
        "eh_proj.": "fc.",
        "final_layernorm.": "norm.",
        "pre_mlp_layernorm.": "layer.post_attention_layernorm.",
    },
)


class MiMoFamily(NativeFamily):
    """MiMo: Qwen2's layer behind a projection of [hidden; embedding], in this order.

    A deeper draft reads what the layer gives, without ``final_layernorm``: the kind of state that
    the head was trained on. The published checkpoints have one head, and their makers draft once.
    """

    normed = False

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        return _MIMO

    def new_block(self, index: int) -> Any:
        """See ``NativeFamily.new_block``."""
        return type(self.layers[0])(self.args)

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``."""
        return MTPHead(
            self.hidden_size, self.norm_eps, self.new_block(index),
            embedding_first=False, normed=False,
        )  # fmt: skip


class MiMoV2Family(NativeFamily):
    """MiMo-V2-Flash: dense layers with a sliding window; every head reads the trunk.

    Head k pairs the trunk's hidden state of token i with token i + k + 1. Fed with the head's
    before it, heads 1 and 2 are right in 0.47 and 0.36 of cases and not 0.73 (sglang-jax, pull
    request 1256).
    """

    normed = False

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        return _MIMO_V2

    def _eps(self) -> float:
        return self.args.layernorm_epsilon

    def new_block(self, index: int) -> Any:
        """See ``NativeFamily.new_block``."""
        return type(self.layers[0])(self.args, is_moe=False, is_sliding_window=True)

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``."""
        return MTPHead(
            self.hidden_size, self.norm_eps, self.new_block(index),
            normed=False, reads_trunk=True, window=self.args.sliding_window_size,
        )  # fmt: skip
