"""The MTP head, and how it is attached to a loaded trunk.

A head in the DeepSeek/Qwen form (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2): row
i pairs the trunk's hidden state of token i with the embedding of token i + 1,

    x_i = fc [enorm(embed(t_(i+1))); hnorm(h_i)],   g_i = norm(layer(x)_i),   logits = lm_head(g_i)

and predicts token i + 2. Embedding and output head are the trunk's. For a deeper draft the head is
applied to its own output: g_i takes the place of the trunk's hidden state of the next row.

Nothing of the trunk is changed: ``attach_head`` returns an object that holds both.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import ModelError
from .families import family_of
from .families.base import HeadedFamily
from .verify import verify

__all__ = ["AttachedHead", "MTPHead", "attach_head", "new_head", "verify"]


class MTPHead(nn.Module):
    """The head's own weights: two norms, the projection, one decoder layer, the final norm.

    embedding_first: whether ``fc`` reads [embedding; hidden] (the usual order) or the reverse.
    """

    def __init__(self, size: int, norm_eps: float, layer: Any, *, embedding_first: bool = True):
        super().__init__()
        self.enorm = nn.RMSNorm(size, eps=norm_eps)
        self.hnorm = nn.RMSNorm(size, eps=norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(size, eps=norm_eps)
        self.embedding_first = embedding_first

    def combine(self, embedding: mx.array, hidden: mx.array) -> mx.array:
        """What the layer reads, (B, L, D), from embedding and hidden, both (B, L, D)."""
        pair = [self.enorm(embedding), self.hnorm(hidden)]
        return self.fc(mx.concatenate(pair if self.embedding_first else pair[::-1], axis=-1))


class AttachedHead:
    """A trunk and its head: what a drafter runs. Neither is changed."""

    def __init__(self, family: HeadedFamily, head: MTPHead):
        self.family = family
        self.head = head

    def new_cache(self) -> Any:
        """An empty cache for the head's layer; its row i holds (hidden i, token i + 1)."""
        return self.family.new_cache()

    def forward(self, hidden: mx.array, tokens: mx.array, cache: Any) -> mx.array:
        """Append rows to the cache and return the head's hidden states.

        hidden: (L, D), the trunk's, or the head's own for a deeper step. tokens: (L,), the token
        after each. Returns (L, D).
        """
        x = self.head.combine(self.family.embed(tokens[None]), hidden[None])
        return self.head.norm(self.family.run_layer(self.head.layer, x, cache))[0]

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits (L, V) of the head's hidden states (L, D), by the trunk's output head."""
        return self.family.logits(hidden[None])[0]


def _headed(trunk: Any) -> HeadedFamily:
    family = family_of(trunk)
    if not isinstance(family, HeadedFamily):
        kind = getattr(trunk, "model_type", type(trunk).__name__)
        raise ModelError(f"no MTP head is known for models of type {kind!r}")
    return family


def new_head(trunk: Any, *, embedding_first: bool = True) -> MTPHead:
    """A randomly initialised head that fits ``trunk``; ``ModelError`` if its family has none."""
    family = _headed(trunk)
    layer = family.new_layer()
    return MTPHead(family.hidden_size, family.norm_eps, layer, embedding_first=embedding_first)


def attach_head(trunk: Any, head: MTPHead) -> AttachedHead:
    """Pair a trunk with a head; ``ModelError`` names a size that does not fit."""
    family = _headed(trunk)
    size = head.fc.weight.shape[0]
    if size != family.hidden_size:
        raise ModelError(f"the head's hidden size is {size}, the trunk's {family.hidden_size}")
    return AttachedHead(family, head)
