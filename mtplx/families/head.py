"""The modules of an MTP head: one, or a chain of them for deeper drafts.

A head in the DeepSeek/Qwen form (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2): row
i pairs the trunk's hidden state of token i with the embedding of token i + 1,

    x_i = fc [enorm(embed(t_(i+1))); hnorm(h_i)],   g_i = norm(layer(x)_i),   logits = lm_head(g_i)

and predicts token i + 2. Embedding and output head are the trunk's unless the head has its own. For
a deeper draft the next head of the chain, or the last one again, reads g in the place of h.

A head may also read the outputs of some of the trunk's layers (EAGLE-3, arXiv 2503.01840), which
``fc`` then has further columns for; a deeper draft has none and leaves those columns out. And it
may draft from a part of the vocabulary only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..draft_vocabulary import DraftVocabulary


class MTPHead(nn.Module):
    """The head's own weights: two norms, the projection, one decoder layer, the final norm.

    embedding_first: whether ``fc`` reads [embedding; hidden] (the usual order) or the reverse; the
    trunk's layers ``levels`` come after both.  vocabulary: what it drafts from, None for all.
    copy_bonus: by how much a drafter raises the logit of the token that followed where the latest
    1, 2, ... tokens occurred before; empty for not at all.

    What some families have besides. bias: of ``fc``.  final_norm: whether there is one.  normed:
    whether a deeper draft reads g after that norm, or before it.  reads_trunk: whether it reads h_i
    as a deeper head of a chain, too, and not the head's before it.  embedding, output: modules of
    its own, None for the trunk's.  window: positions that the layer sees, None for all.
    array_mask: whether the layer needs its mask as an array.
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
        bias: bool = False,
        final_norm: bool = True,
        normed: bool = True,
        reads_trunk: bool = False,
        embedding: nn.Module | None = None,
        output: nn.Module | None = None,
        window: int | None = None,
        array_mask: bool = False,
    ):
        super().__init__()
        self.enorm = nn.RMSNorm(size, eps=norm_eps)
        self.hnorm = nn.RMSNorm(size, eps=norm_eps)
        self.fc = nn.Linear((2 + len(levels)) * size, size, bias=bias)
        self.layer = layer
        if final_norm:
            self.norm = nn.RMSNorm(size, eps=norm_eps)
        if embedding is not None:
            self.embedding = embedding
        if output is not None:
            self.output = output
        self.embedding_first = embedding_first
        self.levels = levels
        self.vocabulary = vocabulary
        self.copy_bonus = copy_bonus
        self.normed = normed
        self.reads_trunk = reads_trunk
        self.window, self.array_mask = window, array_mask

    def combine(self, embedding: mx.array, state: mx.array) -> mx.array:
        """What the layer reads, (B, L, D).

        embedding: (B, L, D).  state: (B, L, F), the trunk's features, or (B, L, D), the head's own.
        """
        size = embedding.shape[-1]
        pair = [self.enorm(embedding), self.hnorm(state[..., :size])]
        ordered = pair if self.embedding_first else pair[::-1]
        x = mx.concatenate([*ordered, state[..., size:]], axis=-1)
        if not self.levels:
            return self.fc(x)
        return x @ self.fc.weight[:, : x.shape[-1]].T

    def finish(self, hidden: mx.array) -> mx.array:
        """The final norm, if there is one."""
        return self.norm(hidden) if "norm" in self else hidden


class MTPChain(nn.Module):
    """Heads of depth 1, 2, ...: each reads the hidden states of the one before it, or the trunk's.

    Head k pairs those of row i with token i + k + 1, k = 0, 1, ...
    """

    def __init__(self, heads: Sequence[MTPHead]):
        super().__init__()
        self.heads = list(heads)
