"""The interface of a family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import mlx.core as mx


class Family(ABC):
    """One trunk, and how to run it in the pieces that speculation needs.

    Shapes: B sequences, L rows, D hidden size, V vocabulary. Caches are changed in place.
    """

    def __init__(self, trunk: Any):
        self.trunk = trunk

    @abstractmethod
    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array | None, mx.array]:
        """Tokens (B, L) -> hidden (B, L, D), or None if the trunk hides it; logits (B, L, V)."""

    @abstractmethod
    def prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array | None:
        """Tokens (B, L) -> hidden (B, L, D) or None, without asking for logits."""


class HeadedFamily(Family):
    """A family whose trunk can carry an MTP head."""

    hidden_size: int
    norm_eps: float

    @abstractmethod
    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens (B, L) -> the trunk's embeddings (B, L, D)."""

    @abstractmethod
    def logits(self, hidden: mx.array) -> mx.array:
        """Hidden (B, L, D), as it comes out of the final norm -> logits (B, L, V)."""

    @abstractmethod
    def new_layer(self) -> Any:
        """A fresh decoder layer of the trunk's kind, randomly initialised."""

    @abstractmethod
    def run_layer(self, layer: Any, x: mx.array, cache: Any) -> mx.array:
        """Run x (B, L, D) through ``layer`` with its own cache, causally -> (B, L, D)."""

    @abstractmethod
    def new_cache(self) -> Any:
        """An empty cache for one such layer."""
