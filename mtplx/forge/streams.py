"""Device queues that share a batch, each with a thread of its own.

On a CPU, MLX multiplies on several cores and does everything else on one: two queues keep two busy.
It takes two threads, too: one fills its queues in the order of the graph, and waits when a hundred
operations are under way, which is before the second queue's turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import TypeVar

import mlx.core as mx

from ..device import on_cpu

T = TypeVar("T")
R = TypeVar("R")


def stream_count() -> int:
    """How many queues pay on the default device."""
    return 2 if on_cpu() and (os.cpu_count() or 1) > 1 else 1


class _Leaving:
    """Clears what MLX keeps for a thread as the thread ends, while Python still lets it.

    MLX keeps compiled functions by thread, with Python objects in them: left to the end of the
    process, they are given back when nobody may any more, and the process aborts.
    """

    def __del__(self) -> None:
        mx.clear_streams()


_here = threading.local()


def _begin() -> None:
    _here.leaving = _Leaving()


@cache
def _thread(number: int) -> ThreadPoolExecutor:
    """One thread, the same one each time. What it computes goes to its own default queue."""
    return ThreadPoolExecutor(1, f"mtplx-forge-{number}", initializer=_begin)


def side_by_side(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of each item, item i always on thread i; a single one on the caller's.

    Arrays belong to the queue of the thread that makes them: ``work`` takes and gives evaluated
    ones. Raises what ``work`` raises, or an interrupt, when all have ended.
    """
    if len(items) == 1:
        return [work(items[0])]
    jobs = [_thread(i).submit(work, item) for i, item in enumerate(items)]
    try:
        wait(jobs)
    except BaseException:
        wait(jobs)
        raise
    return [job.result() for job in jobs]


def shares(count: int, parts: int) -> list[slice]:
    """``count`` items in at most ``parts`` even, consecutive shares, none of them empty."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if b > a]
