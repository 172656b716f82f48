"""Device queues that share a batch.

On a CPU, MLX multiplies on several cores and does everything else on one: two queues keep two busy.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise

import mlx.core as mx

from ..device import on_cpu


def stream_count() -> int:
    """How many queues pay on the default device."""
    return 2 if on_cpu() and (os.cpu_count() or 1) > 1 else 1


@cache
def queues(count: int) -> tuple[mx.Stream, ...]:
    """So many queues, the same ones each time: on a CPU each is a thread that never ends."""
    return tuple(mx.new_stream(mx.default_device()) for _ in range(count))


def shares(count: int, parts: int) -> list[slice]:
    """``count`` items in at most ``parts`` even, consecutive shares, none of them empty."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if b > a]
