"""How much a head's drafts gain from a look at what the text repeats.

Where the latest n tokens occurred before, the token that followed there gets a bonus on its draft
logit. On rows not trained on, many bonuses of an n bring nearly the most acceptance; the highest of
them is taken: what people ask about is copied more than what a model tells itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..drafters.index import NgramIndex
from ..mtp_patch import AttachedHead
from .data import Data
from .objective import rollout

LONGEST = 5
_GRID = np.arange(0.0, 8.01, 0.5)
_TEMPERATURE = 0.6
_NEARLY = 0.99


def fit_copy_bonus(attached: AttachedHead, data: Data, depth: int) -> tuple[float, ...]:
    """The bonus after matches of 1, 2, ... ``LONGEST`` or more tokens; depth: of the drafts."""
    kept = np.zeros((LONGEST, len(_GRID)))
    batch = data.check(data.length)
    for row in range(len(batch.tokens)):
        part = batch.part(slice(row, row + 1))
        tokens = np.asarray(part.tokens)[0].tolist()
        rows = len(tokens) - depth
        states = rollout(attached, part.features[:, :rows], part.tokens, depth)
        for j, state in enumerate(states, 1):
            final = part.features[0, j : j + rows, : state.shape[-1]].astype(mx.float32)
            q, p = (np.array(_law(attached, x)) for x in (state[0], final))
            weights = np.asarray(part.weights)[0, j : j + rows]
            for at, length_, place in _matches(attached, tokens, rows, j):
                kept[length_ - 1] += weights[at] * _acceptance(p[at], q[at], place)
    return highest_of_the_best(kept)


def highest_of_the_best(kept: np.ndarray) -> tuple[float, ...]:
    """For each match length the highest bonus that keeps nearly the most; 0 where nothing matched.

    kept: (``LONGEST``, bonuses of the grid), drafts kept.
    """
    near = (kept >= _NEARLY * kept.max(axis=1, keepdims=True)) & (kept > 0)
    return tuple(float(_GRID[np.flatnonzero(row)[-1]]) if row.any() else 0.0 for row in near)


def _law(attached: AttachedHead, hidden: mx.array) -> mx.array:
    return mx.softmax(attached.logits(hidden) / _TEMPERATURE, axis=-1)


def _matches(
    attached: AttachedHead, tokens: list[int], rows: int, depth: int
) -> Iterator[tuple[int, int, int]]:
    """For each row whose draft of that depth follows a match: row, length, place of the copy.

    Row t drafts after the committed tokens up to t + 1 and depth - 1 drafts.
    """
    index, vocabulary = NgramIndex(1, LONGEST), attached.vocabulary
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
