"""Step-3.5: a chain of heads behind the trunk's layers, each with its own norm and output head.

As in vLLM's ``step3p5_mtp.py`` and NeMo's ``step3p7/mtp.py``: the first head reads the hidden state
before the trunk's final norm, and every further one what the block before it gives, before that
head's own norm. Blocks are dense, of the kind that the configuration gives for layer N + i.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.nn as nn

from ..errors import ModelError
from .head import MTPHead
from .native import MOST_HEADS, SHARED, NativeFamily

_PARTS = (
    ("enorm.", "enorm."),
    ("hnorm.", "hnorm."),
    ("eh_proj.", "fc."),
    ("transformer.shared_head.norm.", "norm."),
    ("transformer.shared_head.output.", "output."),
    ("shared_head.norm.", "norm."),
    ("shared_head.output.", "output."),
    ("", "layer."),
)


class Step35Family(NativeFamily):
    """Step-3.5-Flash: norms are stored as w - 1, some layers see a window only."""

    zero_centred = True
    normed = False

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        rows, first = list[tuple[str, str]](), config["num_hidden_layers"]
        for i in range(MOST_HEADS):
            stem = f"model.layers.{first + i}."
            rows.append((f"{stem}embed_tokens.", f"{SHARED}heads.{i}.embedding."))  # as vLLM has it
            rows += [(stem + stored, f"heads.{i}.{own}") for stored, own in _PARTS]
        return rows

    def new_block(self, index: int) -> Any:
        """See ``NativeFamily.new_block``; ``ModelError`` if layer N + index is not described."""
        place = self.args.num_hidden_layers + index
        try:
            return type(self.layers[0])(self.args, place)
        except IndexError:
            raise ModelError(
                f"config.json does not describe layer {place}, an MTP head: its layer_types or"
                " rope_theta end before it"
            ) from None

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``."""
        block = self.new_block(index)
        return MTPHead(
            self.hidden_size, self.norm_eps, block, normed=self.normed,
            output=nn.Linear(self.hidden_size, self.vocab_size, bias=False),
            window=self.args.sliding_window if block.is_sliding else None,
        )  # fmt: skip
