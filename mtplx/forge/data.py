"""Distilled data as training reads them: windows of rows, from the shards on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import safe_open

from ..errors import ModelFileError
from .conversation import Kind

# How much the trunk's law counts where it is about a token of each kind.
_WEIGHTS = {Kind.TEMPLATE: 0.0, Kind.SEED: 0.3, Kind.USER: 0.5, Kind.ANSWER: 1.0}
_SHARED_TOKENS = 12


@dataclass(frozen=True)
class Batch:
    """features (B, n, F) float16, tokens (B, n) int32, weights (B, n) float32."""

    features: mx.array
    tokens: mx.array
    weights: mx.array

    def part(self, index: slice) -> Batch:
        """Some of its sequences."""
        return Batch(self.features[index], self.tokens[index], self.weights[index])


class Data:
    """The shards of a folder. The last ``held_out`` rows are for checks, never for training.

    Nor are the ``set_apart`` rows that have a seed in common with these, for checks to be of new
    prompts; where seeds are so few that it would be more than a quarter, there are none.
    forbidden: texts, as token ids, that must not be learnt from: a row that shares
    ``_SHARED_TOKENS`` consecutive tokens with one of them is left out.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        vocab_size: int,
        *,
        held_out: int = 16,
        forbidden: Iterable[Sequence[int]] = (),
    ):
        self.vocab_size = vocab_size
        try:
            self._files = [safe_open(str(path), "np") for path in paths]
            self._features = [file.get_slice("features") for file in self._files]
            tokens = [file.get_tensor("tokens") for file in self._files]
            self.kinds = np.concatenate([file.get_tensor("kinds") for file in self._files])
            self.tokens = np.concatenate(tokens)
        except Exception as e:  # the library raises its own error type
            raise ModelFileError(f"{paths[0].parent}: not usable training data ({e})") from e
        self._place = [(f, row) for f, t in enumerate(tokens) for row in range(len(t))]
        self.left_out = _sharing(self.tokens, forbidden)
        count = len(self.tokens)
        held_out = min(held_out, count // 4)
        free = np.setdiff1d(np.arange(count), self.left_out)
        rest, self.held = free[free < count - held_out], free[free >= count - held_out]
        seeds = [_seeds(*row) for row in zip(self.tokens, self.kinds, strict=True)]
        known = {seed for row in self.held for seed in seeds[row]}
        new = rest[[known.isdisjoint(seeds[row]) for row in rest]]
        self.training = new if 4 * len(new) >= 3 * len(rest) else rest
        self.set_apart = len(rest) - len(self.training)
        if not self.training.size or not self.held.size:
            raise ModelFileError(f"{paths[0].parent}: {count} rows are too few to train on")

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.tokens.shape[1]

    def sha256(self) -> str:
        """Of all tokens, in order: what the trunk wrote."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes()).hexdigest()

    def frequency(self) -> np.ndarray:
        """How often each id was sampled, (V,), in the rows for training."""
        sampled = self.tokens[self.training][self.kinds[self.training] >= Kind.USER]
        return np.bincount(sampled, minlength=self.vocab_size)

    def sampled_states(self, rows: np.ndarray, count: int, size: int) -> np.ndarray:
        """The trunk's hidden states, (n, size), that ``count`` sampled tokens were drawn from."""
        random = np.random.default_rng(0)
        before = np.argwhere(self.kinds[rows][:, 1:] >= Kind.USER)
        out = []
        for i, at in before[np.sort(random.permutation(len(before))[:count])].tolist():
            file, inside = self._place[rows[i]]
            out.append(self._features[file][inside : inside + 1, at : at + 1, :size][0])
        return np.concatenate(out).astype(np.float32)

    def batch(self, count: int, length: int, seed: int, step: int) -> Batch:
        """Windows of ``length`` tokens for a step: every row once before any comes again.

        Half of them begin where the row begins, as a prompt does.
        """
        epoch, at = divmod(step * count, len(self.training))
        epochs = range(epoch, epoch + 2 + count // len(self.training))
        orders = [np.random.default_rng([seed, e]) for e in epochs]
        order = np.concatenate([random.permutation(self.training) for random in orders])
        random = np.random.default_rng([seed, step, 1])
        last = self.length - length
        starts = np.where(random.random(count) < 0.5, 0, random.integers(0, last + 1, count))
        return self._windows(order[at : at + count].tolist(), starts.tolist(), length)

    def check(self, length: int) -> Batch:
        """The held-out rows from their beginning."""
        return self._windows(self.held.tolist(), [0] * len(self.held), length)

    def _windows(self, rows: Sequence[int], starts: Sequence[int], length: int) -> Batch:
        features, tokens, weights = [], [], []
        table = np.array([_WEIGHTS[kind] for kind in Kind], np.float32)
        for row, start in zip(rows, starts, strict=True):
            file, inside = self._place[row]
            features.append(self._features[file][inside : inside + 1, start : start + length][0])
            tokens.append(self.tokens[row, start : start + length])
            # A position's law is about the token after it; behind the row nothing is known.
            kinds = self.kinds[row, start + 1 : start + length + 1]
            weights.append(np.pad(table[kinds], (0, length - len(kinds))))
        return Batch(*(mx.array(np.stack(part)) for part in (features, tokens, weights)))


def _seeds(tokens: np.ndarray, kinds: np.ndarray) -> set[bytes]:
    """The seeds in a row: its runs of their kind."""
    edges = np.flatnonzero(np.diff(kinds == Kind.SEED, prepend=False, append=False))
    return {tokens[begin:end].tobytes() for begin, end in edges.reshape(-1, 2)}


def _sharing(tokens: np.ndarray, forbidden: Iterable[Sequence[int]]) -> np.ndarray:
    """Indices of the rows that have a run of tokens in common with a forbidden text."""
    grams: dict[int, set[tuple[int, ...]]] = {}
    for text in forbidden:
        # Of a short text all but a token, which the words around it may change.
        n = max(1, min(_SHARED_TOKENS, len(text) - 1))
        places = range(len(text) - n + 1)
        grams.setdefault(n, set()).update(tuple(text[i : i + n]) for i in places)
    found = [
        row
        for row, ids in enumerate(tokens.tolist())
        if any(
            tuple(ids[i : i + n]) in known
            for n, known in grams.items()
            for i in range(len(ids) - n + 1)
        )
    ]
    return np.array(found, np.int64)
