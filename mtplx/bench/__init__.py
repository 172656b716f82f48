"""Benchmarks: ratios measured side by side in one run, each with what it was measured on."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from ..errors import RequestError
from ..fetch import DEFAULT_MODEL
from .report import Report

__all__ = ["Report", "run"]


def run(
    name: str, *, model: str | None, blas: str, open_model: Callable[[str, str], Any]
) -> Report:
    """Run one benchmark, "copy", "law" or "blas".

    model: for "copy" alone, None for the default.  blas: the choice in force, for the record;
    "blas" has both.  open_model: (model, weights) -> ``Bundle``.  Raises ``RequestError`` for an
    option that the benchmark has no use for.
    """
    if model is not None and name != "copy":
        raise RequestError(f"--model has no use in bench {name}")
    if blas != "auto" and name == "blas":
        raise RequestError("--blas has no use in bench blas, which measures both")
    if name == "copy":
        from . import copy

        report = copy.run(open_model(model or DEFAULT_MODEL, "auto"))
    elif name == "law":
        from . import law

        report = law.run()
    else:
        from . import blas as products

        report = products.run()
    given = (("--model", model), ("--blas", None if blas == "auto" else blas))
    words = [word for pair in given if pair[1] is not None for word in pair if word]
    report.command = shlex.join(["mtplx", "bench", name, *words, "--json"])
    return report
