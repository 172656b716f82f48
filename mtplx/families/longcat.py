"""LongCat-Flash: one dense layer with latent attention under ``model.mtp.``.

As in vLLM's ``longcat_flash_mtp.py`` and SGLang's ``longcat_flash_nextn.py``. The checkpoint has an
embedding for the head: vLLM reads it, SGLang takes the trunk's. It is used where it is there, which
is right whether or not it is a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import tensors
from .head import MTPHead
from .native import NativeFamily, Weights

_TABLE = (
    ("model.mtp.embed_tokens.", "heads.0.embedding."),
    ("model.mtp.norm.", "heads.0.norm."),
    ("model.mtp.layers.0.enorm.m.", "heads.0.enorm."),
    ("model.mtp.layers.0.hnorm.m.", "heads.0.hnorm."),
    ("model.mtp.layers.0.eh_proj.", "heads.0.fc."),
    ("model.mtp.layers.0.transformer_layer.mlp.", "heads.0.layer.mlp."),
    ("model.mtp.layers.0.", "heads.0.layer."),
    ("model.mtp.", "unknown."),
)


class DenseLayer(nn.Module):
    """Attention and a dense network, each behind a norm: half of one of the trunk's layers."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, size: int, eps: float):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """See ``NativeFamily.new_block``."""
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LongcatFamily(NativeFamily):
    """LongCat-Flash: a layer of the trunk is two attentions and two dense networks."""

    @classmethod
    def table(cls, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """See ``NativeFamily.table``."""
        return _TABLE

    def new_block(self, index: int) -> Any:
        """See ``NativeFamily.new_block``."""
        like, args = self.layers[0], self.args
        attention, mlp = type(like.self_attn[0])(args), type(like.mlps[0])(args)
        return DenseLayer(attention, mlp, self.hidden_size, self.norm_eps)

    def new_head(self, index: int, names: Collection[str]) -> MTPHead:
        """See ``NativeFamily.new_head``."""
        own = "embedding.weight" in names
        return MTPHead(
            self.hidden_size, self.norm_eps, self.new_block(index), normed=self.normed,
            embedding=nn.Embedding(self.vocab_size, self.hidden_size) if own else None,
            array_mask=True,
        )  # fmt: skip

    def settle(self, weights: Weights) -> Weights:
        """See ``NativeFamily.settle``; mlx-lm does it for the attentions of the trunk's layers."""
        weights = tensors.latent_projections(weights, self.args)
        one, first = ".layer.self_attn.", ".layer.self_attn.0."
        named = {name.replace(one, first): value for name, value in weights.items()}
        made = self.layers_by_trunk(named, 0)
        return {name.replace(first, one): value for name, value in made.items()}
