"""The trunk's caches of one sequence: run forward, and taken back exactly.

Attention caches are trimmed. A rotating window that wraps, a recurrent state or a chunked cache
cannot be: it is snapshotted before the forward, put back, and the kept tokens are run again. A
cache of a kind not known here is refused: a rollback is exact or it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from .cpu_cache import BankedCache
from .errors import StateError
from .families import Family

# Of these, rows behind ``offset`` are no part of the cache: setting it back or forth is all.
_TRIMMED = (KVCache, BankedCache, QuantizedKVCache)
_SNAPSHOTTED = (RotatingKVCache, ArraysCache, ChunkedKVCache)


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _leaves(cache.caches)
        else:
            yield cache


def _copy(value: Any) -> Any:
    """``value`` with every array behind a handle of its own: caches assign into theirs in place."""
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value


@dataclass(frozen=True)
class Mark:
    """A point to go back to: the length, and a snapshot of each cache that cannot be trimmed."""

    length: int
    snapshots: dict[int, Any]


@dataclass(frozen=True)
class _Ahead:
    """A forward that was started before its tokens were known on the host."""

    ids: mx.array
    outputs: tuple[mx.array | None, mx.array]


class State:
    """Caches of one sequence and how many of its tokens they hold."""

    def __init__(self, family: Family, caches: list[Any] | None = None):
        self.family = family
        self.caches = make_prompt_cache(family.trunk) if caches is None else caches
        self.length = 0
        self._ahead: _Ahead | None = None
        for leaf in _leaves(self.caches):
            if type(leaf) not in _TRIMMED + _SNAPSHOTTED:
                name = type(leaf).__name__
                raise StateError(f"no exact rollback is known for a {name} of this model")

    def forward(self, tokens: Sequence[int]) -> tuple[mx.array | None, mx.array]:
        """Run L tokens: hidden (L, D), or None if the trunk hides it, and logits (L, V)."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and np.asarray(ahead.ids)[0].tolist() == list(tokens):
            outputs = ahead.outputs
            for leaf in _leaves(self.caches):
                leaf.offset += len(tokens)
        else:
            outputs = self._single(*self.family.forward(self._rows(tokens), self.caches))
        self.length += len(tokens)
        return outputs

    def run_ahead(self, ids: mx.array) -> None:
        """Start a forward over ``ids``, (1, L), computed on the device and not read yet.

        The device need not wait for the host between two rounds. The state stays as it is: the
        next ``forward`` takes the result over if its tokens are these, and any other change drops
        it, rows behind the offset being no part of a cache. Does nothing for other caches, nor for
        those of the CPU kernels: what is queued holds their array, which would be copied.
        """
        leaves = list(_leaves(self.caches))
        if any(type(leaf) not in _TRIMMED or type(leaf) is BankedCache for leaf in leaves):
            return
        # What is not queued before the forward would wait for its end.
        mx.async_eval(ids)
        outputs = self._single(*self.family.forward(ids, self.caches))
        for leaf in leaves:
            leaf.trim(ids.shape[1])
        self._ahead = _Ahead(ids, outputs)
        mx.async_eval(outputs[1])

    def drop_ahead(self) -> None:
        """Forget a forward that was started ahead."""
        self._ahead = None

    def prefill(self, tokens: Sequence[int], *, chunk: int = 512) -> Iterator[mx.array | None]:
        """Run tokens without logits, ``chunk`` at a time; yields hidden (<= chunk, D) or None.

        Caches and hidden are computed: a hidden state that waits to be may hold the caches.
        """
        self._ahead = None
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            mark = self.mark(len(part))
            try:
                hidden = self.family.prefill(self._rows(part), self.caches)
                mx.eval([leaf.state for leaf in _leaves(self.caches)], hidden)
            except BaseException:
                self.restore(mark)
                raise
            self.length += len(part)
            yield None if hidden is None else hidden[0]

    def mark(self, rows: int) -> Mark:
        """A point to come back to after at most ``rows`` more tokens."""
        snapshots = {
            i: _copy(leaf.state)
            for i, leaf in enumerate(_leaves(self.caches))
            if not _can_trim(leaf, rows)
        }
        return Mark(self.length, snapshots)

    def rollback(self, mark: Mark, kept: Sequence[int]) -> None:
        """Be what a prefill of everything up to ``mark`` and then ``kept`` gives.

        kept: the first tokens run since the mark. Only a state with snapshots runs them again.
        Raises ``StateError`` if fewer tokens than that were run. If that is interrupted, the state
        is at the mark.
        """
        surplus = self.length - mark.length - len(kept)
        if surplus < 0:
            raise StateError(f"cannot keep {len(kept)} of {surplus + len(kept)} tokens")
        if surplus == 0:
            return
        self._ahead = None
        if not mark.snapshots:
            self._trim_to(mark.length + len(kept))
        else:
            self.restore(mark)
            for _ in self.prefill(kept):
                pass

    def restore(self, mark: Mark) -> None:
        """Go back to ``mark`` from wherever a forward got to, an interrupted one included."""
        self._ahead = None
        self._trim_to(mark.length, skip=mark.snapshots)
        for i, leaf in enumerate(_leaves(self.caches)):
            if i in mark.snapshots:
                leaf.state = _copy(mark.snapshots[i])

    def _trim_to(self, length: int, skip: dict[int, Any] | None = None) -> None:
        for i, leaf in enumerate(_leaves(self.caches)):
            if i in (skip or {}):
                continue
            excess = leaf.offset - length
            if excess > 0 and leaf.trim(excess) != excess:
                raise StateError(f"{type(leaf).__name__} did not give back {excess} tokens")
        self.length = length

    def _single(
        self, hidden: mx.array | None, logits: mx.array
    ) -> tuple[mx.array | None, mx.array]:
        return None if hidden is None else hidden[0], logits[0]

    def _rows(self, tokens: Sequence[int]) -> mx.array:
        return mx.array(np.asarray(tokens, dtype=np.int32)[None])


def _can_trim(leaf: Any, rows: int) -> bool:
    if type(leaf) is RotatingKVCache:
        return leaf.offset + rows < leaf.max_size
    return type(leaf) in _TRIMMED
