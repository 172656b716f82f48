"""Any other mlx_lm trunk: logits only, so no MTP head."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .base import Family


class OpaqueFamily(Family):
    """A trunk of which nothing is known but that it maps tokens and a cache to logits."""

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[None, mx.array]:
        """See ``Family.forward``."""
        return None, self.trunk(tokens, cache=cache)

    def prefill(self, tokens: mx.array, cache: list[Any]) -> None:
        """See ``Family.prefill``; MLX is lazy, so logits that nobody reads are not computed."""
        self.trunk(tokens, cache=cache)
