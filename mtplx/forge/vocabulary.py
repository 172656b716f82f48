"""Which ids a head drafts from, and on which of them a training step compares the two laws."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from ..draft_vocabulary import DraftVocabulary
from ..families.base import HeadedFamily
from .data import Data

_STATES = 16384
_PART = 1024


def expected(family: HeadedFamily, states: np.ndarray) -> np.ndarray:
    """The mean of the trunk's law, (V,), over hidden states (n, D).

    It tells the frequency of rare ids far better than counts of as many samples do.
    """
    total = np.zeros(family.vocab_size)
    for start in range(0, len(states), _PART):
        logits = family.logits(mx.array(states[start : start + _PART]))
        total += np.asarray(mx.softmax(logits.astype(mx.float32), axis=-1).sum(axis=0))
    return total / len(states)


def ranked(family: HeadedFamily, data: Data, always: Iterable[int]) -> np.ndarray:
    """All ids, (V,), the most frequent in the distilled data first, but ``always`` before them."""
    states = data.sampled_states(data.training, _STATES, family.hidden_size)
    counts = data.frequency()
    score = expected(family, states) + counts / max(1, counts.sum())
    score[list(always)] = np.inf
    return np.argsort(-score, kind="stable")


def coverage(family: HeadedFamily, data: Data, vocabulary: DraftVocabulary | None) -> float:
    """The mean mass of the trunk's law, in the held-out rows, on ids that can be drafted."""
    if vocabulary is None:
        return 1.0
    states = data.sampled_states(data.held, _STATES, family.hidden_size)
    return float(expected(family, states)[vocabulary.ids].sum())


class StepVocabulary:
    """The ids of a training step: the most frequent ones, and as many drawn from the others.

    A head that meets the trunk's law given each such set meets it given all of them, at a fraction
    of the cost.  order: ids to draft from, the most frequent first.
    """

    def __init__(self, order: np.ndarray, core: int, drawn: int, seed: int):
        self._core, self._rest = order[:core], order[core:]
        self._drawn, self._seed = min(drawn, len(self._rest)), seed

    def ids(self, step: int) -> np.ndarray:
        """Those of a step, ascending."""
        random = np.random.default_rng([self._seed, step, 2])
        drawn = random.choice(self._rest, self._drawn, replace=False)
        return np.sort(np.concatenate([self._core, drawn]))
