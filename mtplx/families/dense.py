"""Llama and its dense relatives: Mistral, SmolLM2, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .base import create_attention_mask
from .trunk import TrunkFamily


class DenseFamily(TrunkFamily):
    """Trunks of which a head may read the outputs of layers, too."""

    shows_levels = True

    def _run(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        model = self.body
        if not self.levels:
            return super()._run(tokens, cache)
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

    def step(self, tokens: Sequence[int], cache: list[Any]) -> tuple[mx.array | None, mx.array]:
        """See ``Family.step``."""
        found = None
        if hasattr(self.body, "step"):  # a trunk on the CPU kernels
            found = self.body.step(tokens, cache, self.levels, self.output)
        return super().step(tokens, cache) if found is None else found

    def new_layer(self) -> Any:
        """See ``HeadedFamily.new_layer``; never a sliding-window layer."""
        layer = super().new_layer()
        # A file's own factors are not in the arguments.
        layer.self_attn.rope = self.layers[-1].self_attn.rope
        return layer
