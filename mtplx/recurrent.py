"""Recurrent layers that go back to any token of their last forward, without the trunk.

A recurrent state cannot be cut. But a mixer (gated delta net, Mamba-2) projects and convolves its
rows before the recurrence, and that is nearly all of its work: a ``Tape`` keeps those rows, and
from the state before them the recurrence alone runs again over as many as were kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as cached
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import nemotron_h, qwen3_5, qwen3_next

# Children named like ``_ROWWISE`` give a row of theirs for each token, and are called once.
_MIXERS = (
    qwen3_5.GatedDeltaNet,
    qwen3_next.Qwen3NextGatedDeltaNet,
    nemotron_h.NemotronHMamba2Mixer,
)
_ROWWISE = ("in_proj", "conv1d")


class Tape:
    """What one mixer made of the rows of one forward; ``x``, (1, L, D), is None before it ran."""

    mixer: Any
    x: mx.array | None = None

    def __init__(self) -> None:
        self.made: dict[str, mx.array] = {}

    def record(self, mixer: Any, x: mx.array, cache: Any) -> mx.array:
        """Run the mixer as it is: (1, L, D) -> (1, L, D)."""

        def keeping(name: str) -> Any:
            def call(rows: mx.array) -> mx.array:
                self.made[name] = mixer[name](rows)
                return self.made[name]

            return call

        names = [name for name in mixer if name.startswith(_ROWWISE)]
        out = _run(mixer, {name: keeping(name) for name in names}, x, cache)
        self.mixer, self.x = mixer, x
        return out

    def replay(self, cache: Any, rows: int) -> None:
        """Bring ``cache``, as it was before the forward, to where the first ``rows`` leave it.

        What the state does not depend on is never computed: nobody reads the output.
        """
        children = {name: lambda _, out=out: out[:, :rows] for name, out in self.made.items()}
        assert self.x is not None
        _run(self.mixer, children, self.x[:, :rows], cache)


class _Watched:
    """A mixer that records where its cache has a tape, and else is what it was."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        tape = getattr(cache, "tape", None)
        if tape is None or mask is not None:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        return tape.record(self, x, cache)


def _run(mixer: Any, children: dict[str, Any], x: mx.array, cache: Any) -> mx.array:
    """The mixer's own code with other children; the mixer itself stays as it is."""
    double = copy.copy(mixer)
    dict.update(double, children)
    return super(_Watched, double).__call__(x, None, cache)


@cached
def _watched(kind: type) -> type:
    return type(kind.__name__, (_Watched, kind), {})


def watch(trunk: nn.Module) -> None:
    """Make the known mixers of this trunk able to record: single instances, never a class."""
    for module in trunk.modules():
        kind: type = type(module)
        if kind in _MIXERS:
            object.__setattr__(module, "__class__", _watched(kind))


@contextmanager
def recording(caches: dict[int, Any]) -> Iterator[dict[int, Tape]]:
    """A tape for each of the recurrent caches, while the trunk runs; under the same keys."""
    tapes = {i: Tape() for i in caches}
    try:
        for i, cache in caches.items():
            cache.tape = tapes[i]
        yield tapes
    finally:
        for cache in caches.values():
            vars(cache).pop("tape", None)
