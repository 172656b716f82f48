"""Whether the CPU kernels of ``mtplx-kernels`` can be used in this process, and which."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

from .blas import thread_count


@dataclass(frozen=True)
class KernelStatus:
    """Whether the kernels can be used in this process.

    Attributes:
        native: the extension module, None where it cannot be used.
        reason: one line for people: why not; empty where they can.
        isa: the level of instructions in force, e.g. ``avx2``.
        threads: threads that a large product uses.
    """

    native: Any = None
    reason: str = ""
    isa: str = ""
    threads: int = 0


VERSION = "0.7.2"  # of mtplx-kernels
loaded: Any = None  # the extension module once ``status`` has loaded it


@functools.cache
def status() -> KernelStatus:
    """Load the kernels, once a process, and start their threads.

    Raises ``BlasError`` if MTPLX_THREADS is wrong.
    """
    global loaded
    threads = thread_count()
    if importlib.util.find_spec("mtplx_kernels") is None:
        return KernelStatus(reason="the package mtplx-kernels is not installed")
    import mtplx_kernels

    if mtplx_kernels.__version__ != VERSION:
        return KernelStatus(reason=f"mtplx-kernels {mtplx_kernels.__version__} is not {VERSION}")
    try:
        native = mtplx_kernels.native()
    except (ImportError, OSError, AttributeError) as why:
        return KernelStatus(reason=str(why))
    native.set_threads(threads)
    loaded = native
    return KernelStatus(native, isa=native.isa(), threads=threads)


def describe() -> str:
    """One line for reports: the kernels with instructions and threads, or why there are none."""
    now = status()
    if now.native is None:
        return f"no CPU kernels ({now.reason}): slower, through MLX"
    return f"CPU kernels, {now.isa}, {now.threads} thread{'' if now.threads == 1 else 's'}"
