"""Benchmarks: ratios measured side by side in one run, each with what it was measured on."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..fetch import DEFAULT_MODEL
from .report import Report

__all__ = ["Report", "run"]

_TRUNK = ("--model", "--head", "--any-trunk")
_USES = {
    "copy": (*_TRUNK, "--blas"),
    "mtp": (*_TRUNK, "--blas", "--full"),
    "exactness": (*_TRUNK, "--blas", "--plot"),
    "law": ("--blas",),
    "cpu": (*_TRUNK, "--blas", "--full"),
    "blas": (),  # it measures both
}


def run(
    name: str,
    *,
    model: str | None = None,
    blas: str = "auto",
    full: bool = False,
    plot: Path | None = None,
    head: str = "auto",
    any_trunk: bool = False,
    open_model: Callable[[str, str], Any],
) -> Report:
    """Run one benchmark, a key of ``_USES``.

    model: None for the default.  blas: the choice in force, for the record.  full: all prompts.
    plot: a PNG to write.  head, any_trunk: what ``open_model`` was given, for the record.
    open_model: (model, weights) -> ``Bundle``.  Raises ``RequestError`` for an option that the
    benchmark has no use for.
    """
    options = {
        "--model": model,
        "--blas": None if blas == "auto" else blas,
        "--full": full,
        "--plot": plot,
        "--head": None if head == "auto" else head,
        "--any-trunk": any_trunk,
    }
    given = {option: value for option, value in options.items() if value}
    for option in given:
        if option not in _USES[name]:
            raise RequestError(f"{option} has no use in bench {name}")
    report = _report(name, lambda: open_model(model or DEFAULT_MODEL, "auto"), full, plot)
    words = [w for option, value in given.items() for w in (option, value) if w is not True]
    report.command = shlex.join(["mtplx", "bench", name, *map(str, words), "--json"])
    return report


def _report(name: str, bundle: Callable[[], Any], full: bool, plot: Path | None) -> Report:
    if name == "copy":
        from . import copy

        return copy.run(bundle())
    if name == "mtp":
        from . import mtp

        return mtp.run(bundle(), full=full)
    if name == "cpu":
        from . import cpu

        return cpu.run(bundle(), full=full)
    if name == "exactness":
        from . import exactness

        return exactness.run(bundle(), plot=plot)
    if name == "law":
        from . import law

        return law.run()
    from . import blas

    return blas.run()
