"""Llama and its dense relatives: Mistral, SmolLM2, Qwen2, Qwen3."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from .base import HeadedFamily


class DenseFamily(HeadedFamily):
    """Trunks with ``model`` (embedding, layers, norm) and a tied or an own output head."""

    def __init__(self, trunk: Any):
        super().__init__(trunk)
        self.hidden_size = trunk.args.hidden_size
        self.norm_eps = trunk.args.rms_norm_eps

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """See ``Family.forward``; hidden is what the output head sees."""
        hidden = self.trunk.model(tokens, cache)
        return hidden, self.logits(hidden)

    def prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """See ``Family.prefill``."""
        return self.trunk.model(tokens, cache)

    def embed(self, tokens: mx.array) -> mx.array:
        """See ``HeadedFamily.embed``."""
        return self.trunk.model.embed_tokens(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """See ``HeadedFamily.logits``."""
        if self.trunk.args.tie_word_embeddings:
            return self.trunk.model.embed_tokens.as_linear(hidden)
        return self.trunk.lm_head(hidden)

    def new_layer(self) -> Any:
        """See ``HeadedFamily.new_layer``; never a sliding-window layer."""
        return type(self.trunk.model.layers[0])(self.trunk.args)

    def run_layer(self, layer: Any, x: mx.array, cache: Any) -> mx.array:
        """See ``HeadedFamily.run_layer``."""
        return layer(x, create_attention_mask(x, cache), cache)

    def new_cache(self) -> Any:
        """See ``HeadedFamily.new_cache``."""
        return KVCache()
