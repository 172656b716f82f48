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
    if native.loaded is not None and array.dtype == mx.float32 and on_cpu():
        return native.loaded.rows(array, first, last)
    return array[first:last]


def raised(rows: mx.array, place: int, amount: float) -> mx.array:
    """``rows``, (..., n), with ``amount`` more at one place of each; float32 on a CPU."""
    if not on_cpu():
        return rows.at[..., place].add(amount)
    if native.loaded is not None:
        return native.loaded.raised(rows, place, amount)
    return rows.astype(mx.float32).at[..., place].add(amount)
