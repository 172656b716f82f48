"""The attention caches of several layers in one array, which the CPU kernels write at once.

As an array each, sixty would go into every forward and sixty come out, and MLX's bookkeeping for
them takes as long as a fifth of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

_STEP = 64  # positions by which several sequences grow: room for 256 more is gigabytes


class Bank:
    """Keys and values of layers: ``array`` is (layers, 2, batch * heads, room, size) float32.

    What lies behind the offset of the caches is room: it may hold anything.
    """

    def __init__(self, caches: Sequence[KVCache], batch: int, heads: int, size: int):
        self.batch = batch
        self.array = mx.zeros((len(caches), 2, batch * heads, 0, size))
        if used := caches[0].offset:
            pairs = [
                [part[:, :, :used].flatten(0, 1) for part in (c.keys, c.values)] for c in caches
            ]
            self.array = mx.stack([mx.stack(pair) for pair in pairs]).astype(mx.float32)

    def holds(self, caches: Sequence[Any]) -> bool:
        """Whether these are all of its caches, in their order."""
        return len(caches) == len(self.array) and all(
            type(cache) is BankedCache and cache.bank is self and cache.place == place
            for place, cache in enumerate(caches)
        )

    def make_room(self, offset: int, rows: int) -> None:
        """Grow to hold ``rows`` behind the first ``offset``: by whole steps, or by half."""
        if offset + rows > self.array.shape[3]:
            step = KVCache.step if self.batch == 1 else _STEP
            more = max(offset + rows, offset * 3 // 2)
            new = -(-more // step) * step - offset
            widths = [(0, 0), (0, 0), (0, 0), (0, new), (0, 0)]
            self.array = mx.pad(self.array[..., :offset, :], widths)

    def part(self, place: int, which: int) -> mx.array:
        """Keys (0) or values (1) of one layer, (batch, heads, room, size)."""
        return self.array[place, which].reshape(self.batch, -1, *self.array.shape[3:])


class BankedCache(KVCache):
    """One layer's rows of a bank. Written by anybody else, it is an ordinary cache again."""

    bank: Bank
    place: int

    @property
    def keys(self) -> mx.array:
        """(batch, heads, room, size)."""
        return self.bank.part(self.place, 0)

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._leave()
        self.keys = value

    @property
    def values(self) -> mx.array:
        """(batch, heads, room, size)."""
        return self.bank.part(self.place, 1)

    @values.setter
    def values(self, value: mx.array) -> None:
        self._leave()
        self.values = value

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See ``KVCache``."""
        self._leave()
        return self.update_and_fetch(keys, values)

    def __copy__(self) -> KVCache:
        """A bank is written for all that hold it: a copy has arrays of its own."""
        other = KVCache()
        other.keys, other.values, other.offset = self.keys, self.values, self.offset
        return other

    def _leave(self) -> None:
        # In this order, an interrupt leaves a cache that is whole.
        self.__dict__.update(keys=self.keys, values=self.values)
        self.__class__ = KVCache
        del self.bank, self.place


BankedCache.__name__ = KVCache.__name__  # for mlx-lm's files, which name the class to load


def bank_of(caches: Sequence[Any], batch: int, heads: int, size: int) -> Bank:
    """The bank of caches of one length and batch; ordinary ones move into a new one, in place."""
    bank = getattr(caches[0], "bank", None)
    if bank is not None and bank.holds(caches):
        return bank
    bank = Bank(caches, batch, heads, size)
    for place, cache in enumerate(caches):
        cache.bank, cache.place = bank, place
        cache.__class__ = BankedCache
        for name in ("keys", "values"):  # the class's own come first
            vars(cache).pop(name, None)
    return bank
