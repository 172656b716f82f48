"""What a benchmark prints: figures, the command, versions and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..blas import describe, thread_count

_PACKAGES = ("mtplx", "mtplx-kernels", "mlx", "mlx-lm", "numpy", "scipy-openblas32")


@dataclass
class Report:
    """One benchmark's result.

    figures: name -> number, None where it could not be measured.  notes: lines for people, such
    as which outputs were left out and why.
    """

    name: str
    figures: dict[str, float | None]
    command: str = ""
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    machine: dict[str, str] = field(default_factory=lambda: _machine())

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return vars(self)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> dict[str, str]:
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(thread_count()),
        "blas": describe(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def progress() -> Progress:
    """A bar with the time that is left, on stderr, and only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )


def alternate(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each call, run in turn so that all see the same machine."""
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(repeats):
        for i, call in enumerate(calls):
            begin = perf_counter()
            call()
            seconds[i].append(perf_counter() - begin)
    return [median(column) for column in seconds]
