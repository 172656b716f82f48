"""The interface of a family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask

__all__ = ["Family", "HeadedFamily", "create_attention_mask", "one_row"]


def one_row(tokens: Sequence[int]) -> mx.array:
    """The tokens of one sequence as a trunk takes them, (1, L)."""
    return mx.array(np.asarray(tokens, dtype=np.int32)[None])


class Family(ABC):
    """One trunk, and how to run it in the pieces that speculation needs.

    Shapes: B sequences, L rows, D hidden size, V vocabulary. Caches are changed in place. What the
    trunk gives of itself are its features: the hidden state that its output head sees, then the
    outputs of the layers ``levels``, counted from 1 and divided by their root mean square, side by
    side: F = (1 + len(levels)) D numbers.
    """

    def __init__(self, trunk: Any, levels: tuple[int, ...] = ()):
        self.trunk = trunk
        self.levels = levels

    @abstractmethod
    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array | None, mx.array]:
        """Tokens (B, L) -> features (B, L, F), None if the trunk hides them; logits (B, L, V)."""

    def step(self, tokens: Sequence[int], cache: list[Any]) -> tuple[mx.array | None, mx.array]:
        """``forward`` of one sequence: features (L, F) or None, logits (L, V)."""
        features, logits = self.forward(one_row(tokens), cache)
        return None if features is None else features[0], logits[0]

    @abstractmethod
    def prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array | None:
        """Tokens (B, L) -> features (B, L, F) or None, without asking for logits."""


class HeadedFamily(Family):
    """A family whose trunk can carry an MTP head."""

    hidden_size: int
    vocab_size: int
    norm_eps: float

    @abstractmethod
    def prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """See ``Family.prefill``; never None."""

    @abstractmethod
    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens (B, L) -> the trunk's embeddings (B, L, D)."""

    @abstractmethod
    def logits(self, hidden: mx.array) -> mx.array:
        """Hidden (B, L, D), as it comes out of the final norm -> logits (B, L, V)."""

    @property
    @abstractmethod
    def output(self) -> Any:
        """The module of the output head."""

    @abstractmethod
    def output_rows(self, ids: np.ndarray) -> mx.array:
        """The rows of the output head that belong to ``ids``, (n, D), not packed."""

    @property
    @abstractmethod
    def layers(self) -> list[Any]:
        """The trunk's decoder layers, in order."""

    @abstractmethod
    def new_layer(self) -> Any:
        """A fresh decoder layer of the trunk's kind, randomly initialised.

        Called with x (B, L, D), an attention mask and a cache of its own; gives (B, L, D).
        """

    @abstractmethod
    def new_cache(self) -> Any:
        """An empty cache for one such layer."""
