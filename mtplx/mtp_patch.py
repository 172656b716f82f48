"""The MTP head, and how it is attached to a loaded trunk.

A head in the DeepSeek/Qwen form (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2): row
i pairs the trunk's hidden state of token i with the embedding of token i + 1,

    x_i = fc [enorm(embed(t_(i+1))); hnorm(h_i)],   g_i = norm(layer(x)_i),   logits = lm_head(g_i)

and predicts token i + 2. Embedding and output head are the trunk's. For a deeper draft the head is
applied to its own output: g_i takes the place of the trunk's hidden state of the next row.

A head may also read the outputs of some of the trunk's layers (EAGLE-3, arXiv 2503.01840), which
``fc`` then has further columns for; a deeper draft has none and leaves those columns out. And it
may draft from a part of the vocabulary only.

Nothing of the trunk is changed: ``attach_head`` returns an object that holds both.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .draft_vocabulary import DraftVocabulary
from .errors import ModelError
from .families import family_of
from .families.base import HeadedFamily, create_attention_mask
from .verify import verify

__all__ = ["AttachedHead", "MTPHead", "attach_head", "new_head", "verify"]


class MTPHead(nn.Module):
    """The head's own weights: two norms, the projection, one decoder layer, the final norm.

    embedding_first: whether ``fc`` reads [embedding; hidden] (the usual order) or the reverse; the
    trunk's layers ``levels`` come after both.  vocabulary: what it drafts from, None for all.
    copy_bonus: by how much a drafter raises the logit of the token that followed where the latest
    1, 2, ... tokens occurred before; empty for not at all.
    """

    def __init__(
        self,
        size: int,
        norm_eps: float,
        layer: Any,
        *,
        embedding_first: bool = True,
        levels: tuple[int, ...] = (),
        vocabulary: DraftVocabulary | None = None,
        copy_bonus: tuple[float, ...] = (),
    ):
        super().__init__()
        self.enorm = nn.RMSNorm(size, eps=norm_eps)
        self.hnorm = nn.RMSNorm(size, eps=norm_eps)
        self.fc = nn.Linear((2 + len(levels)) * size, size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(size, eps=norm_eps)
        self.embedding_first = embedding_first
        self.levels = levels
        self.vocabulary = vocabulary
        self.copy_bonus = copy_bonus

    def combine(self, embedding: mx.array, state: mx.array) -> mx.array:
        """What the layer reads, (B, L, D).

        embedding: (B, L, D).  state: (B, L, F), the trunk's features, or (B, L, D), the head's own.
        """
        size = embedding.shape[-1]
        pair = [self.enorm(embedding), self.hnorm(state[..., :size])]
        ordered = pair if self.embedding_first else pair[::-1]
        x = mx.concatenate([*ordered, state[..., size:]], axis=-1)
        return x @ self.fc.weight[:, : x.shape[-1]].T


class AttachedHead:
    """A trunk and its head: what a drafter runs. Neither is changed."""

    def __init__(self, family: HeadedFamily, head: MTPHead):
        self.family = family
        self.head = head
        self.vocabulary = head.vocabulary
        self.copy_bonus = head.copy_bonus
        self._rows = None if self.vocabulary is None else family.output_rows(self.vocabulary.ids)

    def new_cache(self) -> Any:
        """An empty cache for the head's layer; its row i holds (hidden i, token i + 1)."""
        return self.family.new_cache()

    def forward(self, state: mx.array, tokens: mx.array, cache: Any) -> mx.array:
        """Append rows to the cache and return the head's hidden states.

        state: (L, F), the trunk's features, or (L, D), the head's own for a deeper step. tokens:
        (L,), the token after each. Returns (L, D).
        """
        mask = create_attention_mask(state[None], cache)
        return self.run(state[None], tokens[None], cache, mask)[0]

    def run(self, state: mx.array, tokens: mx.array, cache: Any, mask: Any) -> mx.array:
        """``forward`` of several sequences, (B, L, F) and (B, L), under a given attention mask."""
        x = self.head.combine(self.family.embed(tokens), state)
        return self.head.norm(self.head.layer(x, mask, cache))

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits of hidden states (..., D) by the trunk's output head, (..., V).

        V are the ids that the head drafts from. The trunk's own hidden states may be given too.
        """
        if self._rows is None:
            return self.family.logits(hidden)
        return hidden @ self._rows.T


def headed_family(trunk: Any, levels: tuple[int, ...] = ()) -> HeadedFamily:
    """The family of a trunk that can carry a head, with the features it is to give.

    Raises ``ModelError`` for another trunk, or a level that is not one of its layers.
    """
    family = family_of(trunk, levels)
    if not isinstance(family, HeadedFamily):
        kind = getattr(trunk, "model_type", type(trunk).__name__)
        raise ModelError(f"no MTP head is known for models of type {kind!r}")
    count = len(family.layers)
    if any(not 1 <= level <= count for level in levels):
        raise ModelError(f"the head reads the layers {list(levels)}, the trunk has {count}")
    return family


def new_head(
    trunk: Any,
    *,
    embedding_first: bool = True,
    levels: tuple[int, ...] = (),
    vocabulary: DraftVocabulary | None = None,
) -> MTPHead:
    """A randomly initialised head that fits ``trunk``; ``ModelError`` if its family has none."""
    family = headed_family(trunk, levels)
    return MTPHead(
        family.hidden_size,
        family.norm_eps,
        family.new_layer(),
        embedding_first=embedding_first,
        levels=levels,
        vocabulary=vocabulary,
    )


def attach_head(trunk: Any, head: MTPHead) -> AttachedHead:
    """Pair a trunk with a head; ``ModelError`` names a size that does not fit."""
    family = headed_family(trunk, head.levels)
    size = head.fc.weight.shape[0]
    if size != family.hidden_size:
        raise ModelError(f"the head's hidden size is {size}, the trunk's {family.hidden_size}")
    if head.vocabulary is not None and head.vocabulary.vocab_size != family.vocab_size:
        raise ModelError(
            f"the head drafts from {head.vocabulary.vocab_size} ids, the trunk has"
            f" {family.vocab_size}"
        )
    return AttachedHead(family, head)
