"""DeepSeek-V3 and V3.2, GLM-5: heads stored as the layers behind the trunk's last.

Latent attention and experts (DeepSeek-V3 report, arXiv 2412.19437, section 2.2; the names are those
of DeepSeek's README_WEIGHTS.md). A deeper draft reads what the output head does, after the head's
own norm, as in transformers' ``MtpModel`` and SGLang; vLLM feeds back what is before that norm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from . import tensors
from .head import MTPHead
from .native import MOST_HEADS, SHARED, NativeFamily, Weights

_NAMES = (
    ("eh_proj.", "fc."),
    ("enorm.", "enorm."),
    ("hnorm.", "hnorm."),
    ("shared_head.norm.", "norm."),
)


class AppendedFamily(NativeFamily):
    """Head i is ``model.layers.{num_hidden_layers + i}.*``: the names of a layer and a few more.

    copies: whether embedding and output head in it are the trunk's again, which the makers of
    DeepSeek-V3 say of theirs; they are not read then.  array_mask: see ``MTPHead``.
    """

    copies = True
    array_mask = False

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        rows, layers = list[tuple[str, str]](), int(config.get("num_hidden_layers") or 0)
        for i in range(MOST_HEADS if layers else 0):
            stored, own = f"model.layers.{layers + i}.", f"heads.{i}."
            rows += [(stored + theirs, own + ours) for theirs, ours in _NAMES]
            doubled = SHARED + own if cls.copies else own
            rows.append((f"{stored}embed_tokens.", f"{doubled}embedding."))
            rows.append((f"{stored}shared_head.head.", f"{doubled}output."))
            rows.append((stored, f"{own}layer."))
        return rows

    def new_block(self, index: int) -> Any:
        """See ``NativeFamily.new_block``: the layer that would follow the trunk's."""
        place = self.args.num_hidden_layers + index
        return type(self.layers[-1])(self.args, place)

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``."""
        size, vocabulary = self.hidden_size, self.vocab_size
        own = "embedding.weight" in names, "output.weight" in names
        return MTPHead(
            size, self.norm_eps, self.new_block(index),
            embedding=nn.Embedding(vocabulary, size) if own[0] else None,
            output=nn.Linear(size, vocabulary, bias=False) if own[1] else None,
            array_mask=self.array_mask,
        )  # fmt: skip

    def settle(self, weights: Weights) -> Weights:
        """See ``NativeFamily.settle``."""
        return tensors.stack_experts(weights)


class DeepSeekFamily(AppendedFamily):
    """DeepSeek-V3: latent attention, whose ``kv_b_proj`` mlx-lm takes in two parts."""

    array_mask = True

    def settle(self, weights: Weights) -> Weights:
        """See ``NativeFamily.settle``."""
        weights = tensors.latent_projections(super().settle(weights), self.args)
        return self.layers_by_trunk(weights, 0)


class SparseFamily(DeepSeekFamily):
    """DeepSeek-V3.2 and GLM-5: an indexer with a cache of its own chooses what a row attends to."""

    def new_cache(self) -> Any:
        """See ``HeadedFamily.new_cache``: the latents', and the indexer's."""
        return CacheList(KVCache(), KVCache())
