"""Llama and its dense relatives: Mistral, SmolLM2, Qwen2, Qwen3."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from .base import HeadedFamily, create_attention_mask


class DenseFamily(HeadedFamily):
    """Trunks with ``model`` (embedding, layers, norm) and a tied or an own output head."""

    def __init__(self, trunk: Any, levels: tuple[int, ...] = ()):
        super().__init__(trunk, levels)
        self.hidden_size = trunk.args.hidden_size
        self.vocab_size = trunk.args.vocab_size
        self.norm_eps = trunk.args.rms_norm_eps

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """See ``Family.forward``."""
        final, features = self._run(tokens, cache)
        return features, self.logits(final)

    def prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """See ``Family.prefill``."""
        return self._run(tokens, cache)[1]

    def _run(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """What the output head sees, (B, L, D), and the features, (B, L, n D)."""
        model = self.trunk.model
        if not self.levels:
            final = model(tokens, cache)
            return final, final
        if hasattr(model, "run_levels"):  # one operation where it can be one
            features = model.run_levels(tokens, cache, self.levels)
            if features is not None:
                return features[..., : self.hidden_size], features
        x = model.embed_tokens(tokens)
        masks: dict[bool, Any] = {}
        taken: dict[int, mx.array] = {}
        for i, (layer, own) in enumerate(zip(model.layers, cache, strict=True)):
            sliding = getattr(layer, "use_sliding", False)
            if sliding not in masks:
                window = model.sliding_window if sliding else None
                masks[sliding] = create_attention_mask(x, own, window_size=window)
            x = layer(x, masks[sliding], own)
            if i + 1 in self.levels:
                # Without their scale, which grows with depth: 16 bits hold them.
                taken[i + 1] = mx.fast.rms_norm(x, None, self.norm_eps)
        final = model.norm(x)
        return final, mx.concatenate([final, *(taken[n] for n in self.levels)], axis=-1)

    def embed(self, tokens: mx.array) -> mx.array:
        """See ``HeadedFamily.embed``."""
        return self.trunk.model.embed_tokens(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """See ``HeadedFamily.logits``."""
        if self.trunk.args.tie_word_embeddings:
            return self.trunk.model.embed_tokens.as_linear(hidden)
        return self.trunk.lm_head(hidden)

    def output_rows(self, ids: np.ndarray) -> mx.array:
        """See ``HeadedFamily.output_rows``."""
        tied = self.trunk.args.tie_word_embeddings
        module = self.trunk.model.embed_tokens if tied else self.trunk.lm_head
        wanted = mx.array(ids)
        if not hasattr(module, "scales"):
            return module.weight[wanted]
        parts = (module.weight[wanted], module.scales[wanted], module.biases[wanted])
        return mx.dequantize(*parts, group_size=module.group_size, bits=module.bits)

    @property
    def layers(self) -> list[Any]:
        """See ``HeadedFamily.layers``."""
        return self.trunk.model.layers

    def new_layer(self) -> Any:
        """See ``HeadedFamily.new_layer``; never a sliding-window layer."""
        last = self.trunk.model.layers[-1]
        layer = type(last)(self.trunk.args)
        layer.self_attn.rope = last.self_attn.rope  # a file's own factors are not in the arguments
        return layer

    def new_cache(self) -> Any:
        """See ``HeadedFamily.new_cache``."""
        return KVCache()
