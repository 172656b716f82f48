"""What is quicker another way where the default device is a CPU, which shares the host's memory."""

from __future__ import annotations

import mlx.core as mx

from . import native


def on_cpu() -> bool:
    """Whether the default device is a CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def rows_of(array: mx.array, first: int, last: int) -> mx.array:
    """``array[first:last]`` of an array that is computed, or soon needed; 0 <= first <= last.

    The CPU kernels copy float32: MLX's way to its thread and back takes longer.
    """
    if _by_kernel(array):
        return native.loaded.rows(array, first, last)
    return array[first:last]


def raised(rows: mx.array, place: int, amount: float) -> mx.array:
    """``rows``, (..., n), with ``amount`` more at one place of each; likewise."""
    if _by_kernel(rows):
        return native.loaded.raised(rows, place, amount)
    return rows.at[..., place].add(amount)


def _by_kernel(array: mx.array) -> bool:
    return native.loaded is not None and array.dtype == mx.float32 and on_cpu()
