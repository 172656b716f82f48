"""Nemotron-H: a Mamba-2 hybrid trunk, a head of sub-layers ``mtp.layers.{0..}``.

As in vLLM's ``nemotron_h_mtp.py`` and NeMo's ``common/mtp``: a head is one sub-layer for every
character of ``mtp_hybrid_override_pattern`` ("*E": attention, then experts). The first carries the
two norms and the projection, the last the final norm, whose output a deeper draft reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ModelError
from . import tensors
from .head import MTPHead
from .native import MOST_HEADS, NativeFamily, Weights

_FIRST = (("enorm.", "enorm."), ("hnorm.", "hnorm."), ("eh_proj.", "fc."))
_LAST = (("final_layernorm.", "norm."),)
_EXPERTS = {"up_proj": "fc1", "down_proj": "fc2"}


class SubLayers(nn.Module):
    """One block after the other; the one with attention has the cache."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = list(parts)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """See ``NativeFamily.new_block``."""
        for part in self.parts:
            x = part(x, mask, cache)
        return x


class NemotronHFamily(NativeFamily):
    """Nemotron-H and Nemotron 3: trunks under ``backbone``."""

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``; "*E" where the configuration has no pattern."""
        pattern = config.get("mtp_hybrid_override_pattern") or config.get("mtp_layers_block_type")
        count = len(pattern or "*E")
        rows = []
        for i in range(MOST_HEADS * count):
            head, place = divmod(i, count)
            parts = _FIRST * (place == 0) + _LAST * (place == count - 1)
            for stored, own in (*parts, ("", f"layer.parts.{place}.")):
                rows.append((f"mtp.layers.{i}.{stored}", f"heads.{head}.{own}"))
        return [*rows, ("mtp.", "unknown.")]

    @property
    def body(self) -> Any:
        """See ``TrunkFamily.body``."""
        return self.trunk.backbone

    @property
    def embedding(self) -> Any:
        """See ``TrunkFamily.embedding``."""
        return self.body.embeddings

    def _eps(self) -> float:
        return self.args.layer_norm_epsilon

    def new_block(self, index: int, kinds: str = "*E") -> Any:
        """See ``NativeFamily.new_block``; kinds: of the sub-layers, as mlx-lm writes them."""
        return SubLayers([type(self.layers[0])(self.args, kind) for kind in kinds])

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``; ``ModelError`` unless one sub-layer has attention."""
        count = 1 + max((int(n.split(".")[2]) for n in names if n.startswith("layer.")), default=0)
        kinds = "".join(_kind(names, f"layer.parts.{place}.mixer.") for place in range(count))
        if kinds.count("*") != 1 or "M" in kinds:
            raise ModelError(f"an MTP head of the sub-layers {kinds!r} is not known of this family")
        block = self.new_block(index, kinds)
        return MTPHead(self.hidden_size, self.norm_eps, block, normed=self.normed)

    def settle(self, weights: Weights) -> Weights:
        """See ``NativeFamily.settle``."""
        out = {}
        for name, value in tensors.stack_experts(weights).items():
            stem, found, rest = name.partition(".switch_mlp.")
            part, _, end = rest.partition(".")
            out[f"{stem}{found}{_EXPERTS.get(part, part)}.{end}" if found else name] = value
        return out


def _kind(names: Collection[str], mixer: str) -> str:
    """The kind of a sub-layer by the names of its weights."""
    own = {name.removeprefix(mixer).partition(".")[0] for name in names if name.startswith(mixer)}
    marks = (("*", {"q_proj", "o_proj"}), ("M", {"in_proj"}), ("E", {"gate", "switch_mlp"}))
    return next((kind for kind, those in marks if own & those), "-")
