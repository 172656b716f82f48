"""Benchmarks: ratios measured side by side in one run, each with what it was measured on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .report import Report

__all__ = ["Report", "run"]


def run(name: str, *, model: str, open_model: Callable[[str, str], Any]) -> Report:
    """Run one benchmark, "copy", "law" or "blas".

    model: for the ones that need one.  open_model: (model, weights) -> ``Bundle``.
    """
    if name == "copy":
        from . import copy

        return copy.run(open_model(model, "auto"))
    if name == "law":
        from . import law

        return law.run()
    from . import blas

    return blas.run()
