"""Trunks made of an embedding, layers, a final norm and an output head: nearly all of mlx-lm's."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from ..errors import ModelError
from .base import HeadedFamily


class TrunkFamily(HeadedFamily):
    """A family that is told where a trunk has its parts; the defaults are mlx-lm's usual names.

    normed: whether the head reads what the output head sees (the usual way), or what the final norm
    does.  shows_levels: whether it may read the outputs of layers besides.
    """

    normed = True
    shows_levels = False

    def __init__(self, trunk: Any, levels: tuple[int, ...] = ()):
        if levels and not self.shows_levels:
            raise ModelError(f"a {trunk.model_type} trunk does not show what its layers give")
        super().__init__(trunk, levels)
        self.args = self.text.args
        self.hidden_size: int = self.args.hidden_size
        self.vocab_size: int = self.args.vocab_size
        self.norm_eps: float = self._eps()
        self._body = self.body
        if not self.normed:
            # The same layers in the same order, without the norm at their end.
            self._body = copy.copy(self.body)
            self._body.norm = nn.Identity()

    # --- where things are ---

    @property
    def text(self) -> Any:
        """The language model: the trunk, or a part of it."""
        return self.trunk

    @property
    def body(self) -> Any:
        """What maps tokens and caches to what the output head sees."""
        return self.text.model

    @property
    def embedding(self) -> Any:
        """The embedding of tokens."""
        return self.body.embed_tokens

    @property
    def layers(self) -> list[Any]:
        """See ``HeadedFamily.layers``."""
        return self.body.layers

    def _eps(self) -> float:
        return self.args.rms_norm_eps

    # --- running them ---

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """See ``Family.forward``."""
        final, features = self._run(tokens, cache)
        return features, self.logits(final)

    def prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """See ``Family.prefill``."""
        return self._run(tokens, cache)[1]

    def _run(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """What the output head sees, (B, L, D), and the features, (B, L, F)."""
        features = self._body(tokens, cache)
        return (features if self.normed else self.body.norm(features)), features

    def embed(self, tokens: mx.array) -> mx.array:
        """See ``HeadedFamily.embed``."""
        return self.embedding(tokens)

    @property
    def output(self) -> Any:
        """The module whose rows belong to ids in the output head."""
        return self.embedding if self._tied else self.text.lm_head

    @property
    def _tied(self) -> bool:
        return "lm_head" not in self.text

    def logits(self, hidden: mx.array) -> mx.array:
        """See ``HeadedFamily.logits``."""
        return self.embedding.as_linear(hidden) if self._tied else self.text.lm_head(hidden)

    def output_rows(self, ids: np.ndarray) -> mx.array:
        """See ``HeadedFamily.output_rows``."""
        module, wanted = self.output, mx.array(ids)
        if not hasattr(module, "scales"):
            return module.weight[wanted]
        biases = None if module.biases is None else module.biases[wanted]
        return mx.dequantize(
            module.weight[wanted], module.scales[wanted], biases,
            group_size=module.group_size, bits=module.bits, mode=module.mode,
        )  # fmt: skip

    def new_layer(self) -> Any:
        """See ``HeadedFamily.new_layer``."""
        return type(self.layers[-1])(self.args)

    def new_cache(self) -> Any:
        """See ``HeadedFamily.new_cache``."""
        return KVCache()
