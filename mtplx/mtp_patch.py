"""How an MTP head (``families.head``) is attached to a loaded trunk.

Nothing of the trunk is changed: ``attach_head`` returns an object that holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from .draft_vocabulary import DraftVocabulary
from .errors import ModelError
from .families import family_of
from .families.base import HeadedFamily, create_attention_mask
from .families.head import MTPChain, MTPHead
from .verify import verify

__all__ = [
    "AttachedHead",
    "MTPChain",
    "MTPHead",
    "attach_head",
    "cut_cache",
    "headed_family",
    "new_head",
    "verify",
]


class AttachedHead:
    """A trunk and its head: what a drafter runs. Neither is changed.

    further: the heads of depth 2, 3, ... of a chain, attached as well.
    """

    def __init__(self, family: HeadedFamily, head: MTPHead, further: Sequence[MTPHead] = ()):
        self.family = family
        self.head = head
        self.further = tuple(AttachedHead(family, other) for other in further)
        self.vocabulary = head.vocabulary
        self.copy_bonus = head.copy_bonus
        self._rows = None if self.vocabulary is None else family.output_rows(self.vocabulary.ids)

    def new_cache(self) -> Any:
        """An empty cache for the head's layer; its row i holds (hidden i, token i + 1)."""
        return self.family.new_cache()

    def forward(self, state: mx.array, tokens: mx.array, cache: Any) -> mx.array:
        """Append rows to the cache and return the head's hidden states.

        state: (L, F), the trunk's features, or (L, D), a head's own for a deeper step. tokens:
        (L,), the token after each. Returns (L, D).
        """
        head, x = self.head, state[None]
        mask = create_attention_mask(x, _first(cache), head.window, head.array_mask)
        return self.run(x, tokens[None], cache, mask)[0]

    def run(self, state: mx.array, tokens: mx.array, cache: Any, mask: Any) -> mx.array:
        """``forward`` of several sequences, (B, L, F) and (B, L), under a given attention mask."""
        head = self.head
        embed = head.embedding if "embedding" in head else self.family.embed
        out = head.layer(head.combine(embed(tokens), state), mask, cache)
        return head.finish(out) if head.normed else out

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits of the head's hidden states (..., D), (..., V).

        V are the ids that the head drafts from. The trunk's own hidden states may be given too.
        """
        head = self.head
        if not head.normed:
            hidden = head.finish(hidden)
        if "output" in head:
            return head.output(hidden)
        if self._rows is None:
            return self.family.logits(hidden)
        return hidden @ self._rows.T

    def joined(self, logits: mx.array, hidden: mx.array, token: int) -> mx.array:
        """Logits (1, V) of a hidden state (1, D) and, behind them, that of another id."""
        hidden = hidden if self.head.normed else self.head.finish(hidden)
        row = self.family.output_rows(np.array([token]))
        return mx.concatenate([logits, hidden @ row.T], axis=-1)


def _first(cache: Any) -> Any:
    return cache[0] if isinstance(cache, CacheList) else cache


def cut_cache(cache: Any, length: int) -> None:
    """Drop all but the first rows of a head's cache, or of each of several that belong together."""
    for each in cache.caches if isinstance(cache, CacheList) else (cache,):
        each.trim(each.offset - length)


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


def attach_head(trunk: Any, head: MTPHead | MTPChain) -> AttachedHead:
    """Pair a trunk with a head or a chain; ``ModelError`` names a size that does not fit."""
    head, *further = head.heads if isinstance(head, MTPChain) else [head]
    family = headed_family(trunk, head.levels)
    size = head.fc.weight.shape[0]
    if size != family.hidden_size:
        raise ModelError(f"the head's hidden size is {size}, the trunk's {family.hidden_size}")
    if head.vocabulary is not None and head.vocabulary.vocab_size != family.vocab_size:
        raise ModelError(
            f"the head drafts from {head.vocabulary.vocab_size} ids, the trunk has"
            f" {family.vocab_size}"
        )
    return AttachedHead(family, head, further)
