"""Step 1 of a training: the trunk writes its own data, and its features are kept with it.

Data lies in shards, each a function of the plan and its number alone, so that a run that was
stopped goes on with the next shard, and each written whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import load_file, save_file

from ..errors import ModelError
from ..families import family_of
from ..load import Bundle
from .conversation import Layout, Row, Seed, Style
from .streams import queues, shares


@dataclass(frozen=True)
class DataPlan:
    """What the data are a function of, besides trunk, tokenizer and seeds.

    shards: how many.  rows, length: of each shard, in sequences and tokens.  levels: the trunk's
    layers whose outputs are kept beside the final hidden state.  streams: device queues that
    share the rows, so that one can multiply while another does what runs on a single core.
    """

    seed: int = 0
    shards: int = 3
    rows: int = 256
    length: int = 320
    levels: tuple[int, ...] = ()
    streams: int = 2
    style: Style = field(default_factory=Style)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.shards * self.rows * self.length


@dataclass(frozen=True)
class Shard:
    """tokens (N, L) int32, kinds (N, L) uint8, features (N, L, F) float16."""

    tokens: np.ndarray
    kinds: np.ndarray
    features: np.ndarray


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{number:05d}.safetensors"


def read_shard(path: Path) -> Shard:
    """A shard as it was written."""
    return Shard(**load_file(path))


def content_hash(shard: Shard) -> str:
    """sha256 of a shard's tokens: what the trunk wrote."""
    return hashlib.sha256(np.ascontiguousarray(shard.tokens, dtype="<i4").tobytes()).hexdigest()


def distil(
    bundle: Bundle,
    seeds: Sequence[Seed],
    plan: DataPlan,
    folder: Path,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Write the shards that are missing. ``on_progress`` is told how many tokens were added."""
    folder.mkdir(parents=True, exist_ok=True)
    encode = bundle.tokenizer.encode
    known = [(tuple(encode(s.text, add_special_tokens=False)), s.stem) for s in seeds]
    room = plan.length // 2
    known = [(ids[:room], stem) for ids, stem in known if ids]
    for number in range(plan.shards):
        path = shard_path(folder, number)
        if path.exists():
            on_progress(plan.rows * plan.length)
            continue
        shard = _write(bundle, known, plan, number, on_progress)
        temporary = path.with_suffix(".partial")
        save_file(vars(shard), temporary)
        os.replace(temporary, path)


def _write(
    bundle: Bundle,
    seeds: Sequence[tuple[tuple[int, ...], bool]],
    plan: DataPlan,
    number: int,
    on_progress: Callable[[int], None],
) -> Shard:
    layout = Layout.of(bundle.tokenizer)
    random = np.random.default_rng([plan.seed, number])
    rows = [
        Row(layout, seeds, plan.style, bundle.tokenizer.eos_ids, child)
        for child in random.spawn(plan.rows)
    ]
    tokens = np.zeros((plan.rows, plan.length), np.int32)
    kinds = np.zeros((plan.rows, plan.length), np.uint8)
    groups = [
        _Group(bundle, plan, stream, rows[part], tokens[part], kinds[part])
        for stream, part in zip(queues(plan.streams), shares(plan.rows, plan.streams), strict=False)
    ]
    for at in range(plan.length):
        for group in groups:
            group.start(at)
        # One call for all: only then do the queues run side by side.
        mx.eval([group.pending for group in groups])
        for group in groups:
            group.collect(at)
        on_progress(plan.rows)
    features = np.concatenate([group.features for group in groups])
    return Shard(tokens, kinds, features)


class _Group:
    """Rows that advance together on one device queue."""

    def __init__(
        self,
        bundle: Bundle,
        plan: DataPlan,
        stream: mx.Stream,
        rows: Sequence[Row],
        tokens: np.ndarray,
        kinds: np.ndarray,
    ):
        self._family = family_of(bundle.trunk, plan.levels)
        self._cache: list[Any] = make_prompt_cache(bundle.trunk)
        self._stream = stream
        self._rows, self._tokens, self._kinds = rows, tokens, kinds
        self._logits = np.zeros((len(rows), 1), np.float32)  # the first token is given
        self.features = np.zeros((len(rows), plan.length, 0), np.float16)
        self.pending: list[mx.array] = []

    def start(self, at: int) -> None:
        """Put a token in column ``at`` of every row; ``pending`` is the forward over it."""
        for i, row in enumerate(self._rows):
            self._tokens[i, at], self._kinds[i, at] = row.next(self._logits[i])
        with mx.stream(self._stream):
            column = mx.array(self._tokens[:, at : at + 1])
            features, logits = self._family.forward(column, self._cache)
            if features is None:
                raise ModelError("this model does not show its hidden states: no head can use it")
            self.pending = [features[:, 0].astype(mx.float16), logits[:, 0].astype(mx.float32)]

    def collect(self, at: int) -> None:
        """Take what the forward gave."""
        values, self._logits = (np.asarray(array) for array in self.pending)
        if not self.features.size:
            self.features = np.zeros((*self._tokens.shape, values.shape[1]), np.float16)
        self.features[:, at] = values
