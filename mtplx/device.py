"""What is quicker another way where the default device is a CPU, which shares the host's memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def on_cpu() -> bool:
    """Whether the default device is a CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def rows_of(array: mx.array, rows: slice) -> mx.array:
    """Some rows of an array that is computed, or soon needed.

    On a CPU they are copied: an operation, for which MLX goes to its thread and back, takes longer.
    """
    if on_cpu() and array.dtype == mx.float32:
        return mx.array(np.asarray(array)[rows])
    return array[rows]


def raised(rows: mx.array, place: int, amount: float) -> mx.array:
    """``rows``, (..., n), with ``amount`` more at one place of each."""
    if on_cpu() and rows.dtype == mx.float32:
        copy = np.array(rows)
        copy[..., place] += np.float32(amount)
        return mx.array(copy)
    return rows.at[..., place].add(amount)
