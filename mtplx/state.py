"""The trunk's caches of one sequence: run forward, and taken back exactly.

Attention caches are trimmed. A rotating window that wraps, a recurrent state or a chunked cache
cannot be: it is snapshotted before the forward, put back, and the kept tokens are run again:
through the recurrences alone where ``recurrent`` knows all such layers, else through the trunk. A
cache of a kind not known here is refused: a rollback is exact or it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from .families.base import one_row
from .recurrent import Tape, recording, watch

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


@dataclass
class Mark:
    """A point to go back to: the length, and a snapshot of each cache that cannot be trimmed.

    tapes: of each of these, what the forward over ``tokens`` from here recorded; empty where
    nothing did. They live as long as the mark does, or until it is restored.
    """

    length: int
    snapshots: dict[int, Any]
    tokens: list[int] = field(default_factory=list)
    tapes: dict[int, Tape] = field(default_factory=dict)


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
        self._open: Mark | None = None  # the last mark, until something was run or taken back
        kinds = {type(leaf) for leaf in _leaves(self.caches)}
        for kind in kinds.difference(_TRIMMED, _SNAPSHOTTED):
            raise StateError(f"no exact rollback is known for a {kind.__name__} of this model")
        # A cache may go from one of these kinds to another, never to any else.
        self._always_trimmed = kinds.issubset(_TRIMMED)
        if ArraysCache in kinds:
            watch(family.trunk)

    def forward(self, tokens: Sequence[int]) -> tuple[mx.array | None, mx.array]:
        """Run L tokens: hidden (L, D), or None if the trunk hides it, and logits (L, V)."""
        ahead, self._ahead = self._ahead, None
        mark, self._open = self._open, None
        if ahead is not None and np.asarray(ahead.ids)[0].tolist() == list(tokens):
            outputs = ahead.outputs
            for leaf in _leaves(self.caches):
                leaf.offset += len(tokens)
        else:
            with recording(self._to_record(mark, len(tokens))) as tapes:
                outputs = self.family.step(tokens, self.caches)
            if mark is not None and all(tape.x is not None for tape in tapes.values()):
                mark.tokens, mark.tapes = list(tokens), tapes
        self.length += len(tokens)
        return outputs

    def _to_record(self, mark: Mark | None, rows: int) -> dict[int, Any]:
        """The caches that tapes can take back to within ``rows`` tokens; all of them, or none."""
        if mark is None or rows < 2 or not mark.snapshots:
            return {}
        leaves = {i: leaf for i, leaf in enumerate(_leaves(self.caches)) if i in mark.snapshots}
        return leaves if all(type(leaf) is ArraysCache for leaf in leaves.values()) else {}

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
        hidden, logits = self.family.forward(ids, self.caches)
        outputs = None if hidden is None else hidden[0], logits[0]
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
        self._ahead = self._open = None
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            mark = self._snapshot(len(part))
            try:
                hidden = self.family.prefill(one_row(part), self.caches)
                mx.eval([leaf.state for leaf in _leaves(self.caches)], hidden)
            except BaseException:
                self.restore(mark)
                raise
            self.length += len(part)
            yield None if hidden is None else hidden[0]

    def mark(self, rows: int) -> Mark:
        """A point to come back to after at most ``rows`` more tokens."""
        self._open = self._snapshot(rows)
        return self._open

    def _snapshot(self, rows: int) -> Mark:
        if self._always_trimmed:
            return Mark(self.length, {})
        snapshots = {
            i: _copy(leaf.state)
            for i, leaf in enumerate(_leaves(self.caches))
            if not _can_trim(leaf, rows)
        }
        return Mark(self.length, snapshots)

    def rollback(self, mark: Mark, kept: Sequence[int]) -> None:
        """Be what a prefill of everything up to ``mark`` and then ``kept`` gives.

        kept: the first tokens run since the mark. Only a state with snapshots runs them again,
        and only the trunk's recurrences where tapes of the forward over them allow it.
        Raises ``StateError`` if fewer tokens than that were run. If that is interrupted, the state
        is at the mark.
        """
        surplus = self.length - mark.length - len(kept)
        if surplus < 0:
            raise StateError(f"cannot keep {len(kept)} of {surplus + len(kept)} tokens")
        self._open = None
        if surplus == 0:
            return
        self._ahead = None
        if not mark.snapshots:
            self._trim_to(mark.length + len(kept))
        elif kept and mark.tapes and mark.tokens[: len(kept)] == list(kept):
            self._replay(mark, len(kept))
        else:
            self.restore(mark)
            for _ in self.prefill(kept):
                pass

    def restore(self, mark: Mark) -> None:
        """Go back to ``mark`` from wherever a forward got to, an interrupted one included."""
        self._ahead = self._open = None
        mark.tapes.clear()
        self._put_back(mark, mark.length)

    def _replay(self, mark: Mark, rows: int) -> None:
        """Go back to where the first ``rows`` tokens since the mark left the state."""
        leaves = list(_leaves(self.caches))
        try:
            self._put_back(mark, mark.length + rows)
            for i, tape in mark.tapes.items():
                tape.replay(leaves[i], rows)
            # Started now, so that what is queued does not hold the tapes.
            mx.async_eval([leaves[i].state for i in mark.tapes])
        except BaseException:
            self.restore(mark)
            raise

    def _put_back(self, mark: Mark, length: int) -> None:
        """Trim what can be trimmed to ``length``; the other caches go back to the mark."""
        self._trim_to(length, skip=mark.snapshots)
        for i, leaf in enumerate(_leaves(self.caches)):
            if i in mark.snapshots:
                leaf.state = _copy(mark.snapshots[i])

    def _trim_to(self, length: int, skip: dict[int, Any] | None = None) -> None:
        for i, leaf in enumerate(_leaves(self.caches)):
            if i in (skip or {}):
                continue
            excess = leaf.offset - length
            if excess > 0 and type(leaf) in _TRIMMED:
                leaf.offset = length
            elif excess > 0 and leaf.trim(excess) != excess:
                raise StateError(f"{type(leaf).__name__} did not give back {excess} tokens")
        self.length = length


def _can_trim(leaf: Any, rows: int) -> bool:
    if type(leaf) is RotatingKVCache:
        return leaf.offset + rows < leaf.max_size
    return type(leaf) in _TRIMMED
