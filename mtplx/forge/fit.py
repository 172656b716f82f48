"""What is settled when the weights are there, on rows that were not trained on.

How sharp the draft law is: a head hedges where it cannot tell, but laws that are cut by top-p and
top-k keep more drafts of a sharper one. And how much drafts gain from a look at what repeats
itself: where the latest n tokens occurred before, the token that followed there gets a bonus on its
draft logit. Many bonuses of an n bring nearly the most acceptance; the highest of them is taken:
what people ask about is copied more than what a model tells itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..distribution import excess
from ..drafters.index import NgramIndex
from ..fast_sampling import sparse_distributions_from_mlx_logits
from ..mtp_patch import AttachedHead
from ..sampler_config import SamplerConfig
from .data import Data
from .objective import rollout

LONGEST = 8
_GRID = np.arange(0.0, 8.01, 0.5)
_TEMPERATURE = 0.6
_NEARLY = 0.99
# Of several that keep as many, the first.
_SHARPNESS = (1.0, 1.1, 0.9, 1.2, 0.8, 1.3, 1.4, 1.5, 1.6)
_SAMPLINGS = tuple(SamplerConfig(temperature=t, top_p=0.95, top_k=20) for t in (0.6, 1.0))


class _Drafts(NamedTuple):
    """Of a held-out row at a depth j: the tokens, and for each row t its weight and logits (R, V).

    student, teacher: the head's and the trunk's, of what follows token t + j, on the draft ids.
    """

    tokens: list[int]
    depth: int
    weights: np.ndarray
    student: mx.array
    teacher: mx.array


def _drafts(attached: AttachedHead, data: Data, depth: int) -> Iterator[_Drafts]:
    batch = data.check(data.length)
    rows = data.length - depth
    for row in range(len(batch.tokens)):
        part = batch.part(slice(row, row + 1))
        tokens, weights = np.asarray(part.tokens)[0].tolist(), np.asarray(part.weights)[0]
        states = rollout(attached, part.features[:, :rows], part.tokens, depth)
        for j, state in enumerate(states, 1):
            final = part.features[0, j : j + rows, : state.shape[-1]].astype(mx.float32)
            logits = attached.logits(state[0]), attached.logits(final)
            yield _Drafts(tokens, j, weights[j : j + rows], *logits)


def fit_sharpness(attached: AttachedHead, data: Data, depth: int) -> float:
    """The factor on a head's logits with which most drafts are kept, at T = 0.6 and 1."""
    kept = np.zeros(len(_SHARPNESS))
    for drafts in _drafts(attached, data, depth):
        for config in _SAMPLINGS:
            p_rows = sparse_distributions_from_mlx_logits(drafts.teacher, config)
            for i, factor in enumerate(_SHARPNESS):
                q_rows = sparse_distributions_from_mlx_logits(drafts.student * factor, config)
                pairs = zip(p_rows, q_rows, strict=True)
                kept[i] += drafts.weights @ [1 - excess(p, q)[1].sum() for p, q in pairs]
    return _SHARPNESS[int(kept.argmax())]


def fit_copy_bonus(attached: AttachedHead, data: Data, depth: int) -> tuple[float, ...]:
    """The bonus after matches of 1, 2, ... ``LONGEST`` or more tokens; depth: of the drafts."""
    kept = np.zeros((LONGEST, len(_GRID)))
    for drafts in _drafts(attached, data, depth):
        q, p = (
            np.array(mx.softmax(logits / _TEMPERATURE, axis=-1))
            for logits in (drafts.student, drafts.teacher)
        )
        for at, length, place in _matches(attached, drafts.tokens, len(p), drafts.depth):
            kept[length - 1] += drafts.weights[at] * _acceptance(p[at], q[at], place)
    return highest_of_the_best(kept)


def highest_of_the_best(kept: np.ndarray) -> tuple[float, ...]:
    """For each match length the highest bonus that keeps nearly the most.

    Where nothing matched it is that of a token less, 0 for the first.  kept: (``LONGEST``, bonuses
    of the grid), drafts kept.
    """
    bonuses = [0.0]
    for row in kept:
        near = np.flatnonzero((row >= _NEARLY * row.max()) & (row > 0))
        bonuses.append(float(_GRID[near[-1]]) if near.size else bonuses[-1])
    return tuple(bonuses[1:])


def _matches(
    attached: AttachedHead, tokens: list[int], rows: int, depth: int
) -> Iterator[tuple[int, int, int]]:
    """For each row whose draft of that depth follows a match: row, length, place of the copy.

    Row t drafts after the committed tokens up to t + 1 and depth - 1 drafts.
    """
    index, vocabulary = NgramIndex(LONGEST), attached.vocabulary
    index.extend(tokens[:1])
    for row in range(rows):
        index.extend(tokens[row + 1 : row + 2])
        found = index.find(tokens[row + 2 : row + 1 + depth])
        if found is not None:
            copied = index.tokens[found[1]]
            place = copied if vocabulary is None else vocabulary.place(copied)
            if place is not None:
                yield row, found[0], place


def _acceptance(p: np.ndarray, q: np.ndarray, place: int) -> np.ndarray:
    """The sum of min(p, q') for every bonus of the grid, q' being q with one logit raised."""
    raised = q[place] * np.exp(_GRID / _TEMPERATURE)
    total = 1.0 - q[place] + raised
    others = np.minimum(p, q / total[:, None]).sum(axis=1) - np.minimum(p[place], q[place] / total)
    return others + np.minimum(p[place], raised / total)
