"""What surrounds the package: machine, versions, and what plots are drawn with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import __version__, native
from .blas import describe, thread_count
from .errors import MtplxError

_PACKAGES = ("mtplx-kernels", "mlx", "mlx-lm", "numpy", "scipy-openblas32")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on."""
    found = {"python": platform.python_version(), "mtplx": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, str]:
    """Processor, system, cores, threads, BLAS and kernels."""
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(thread_count()),
        "blas": describe(),
        "kernels": native.describe(),
    }


def figure_class() -> Any:
    """Matplotlib's ``Figure``; ``MtplxError`` naming the extra where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MtplxError("a plot needs matplotlib: pip install 'mtplx[forge]'") from e
    return Figure


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
