"""What ``mtplx forge train`` and ``mtplx forge eval`` do, given their options."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..blas import activate
from ..environment import figure_class
from ..errors import RequestError
from ..fetch import known


@dataclass(frozen=True)
class Request:
    """The options of ``mtplx forge train``, with its defaults where they are left out."""

    trunk: str
    out: Path
    prompts: tuple[Path, ...] = ()
    shards: int = 16
    steps: int = 3300
    depth: int = 3
    vocabulary: int = 8192
    seed: int = 0
    pause_after: float | None = None
    each: int = 12
    base_model: str | None = None
    license: str | None = None

    def command(self) -> str:
        """The command line that makes the same head, without what has no influence on it."""
        words = ["mtplx", "forge", "train", _shown(self.trunk), "--out", _shown(self.out)]
        words += self._given()
        return shlex.join(words)

    def trained_ids(self) -> int:
        """How many ids training compares the laws on: more than are drafted, and 0 for all."""
        from .train import TrainPlan

        return self.vocabulary and max(self.vocabulary, TrainPlan.vocabulary)

    def _given(self) -> Iterator[str]:
        for name in ("shards", "steps", "depth", "vocabulary", "seed"):
            if getattr(self, name) != getattr(Request, name):
                yield from (f"--{name}", str(getattr(self, name)))
        for path in self.prompts:
            yield from ("--prompts", path.name)


def train(request: Request) -> bool:
    """Train, or go on training; False if the time was over before the end."""
    activate()
    from ..head_file import read_head
    from ..load import load
    from .distil import DataPlan
    from .run import PROMPTS, Clock, Paused, default_levels, evaluate, run
    from .streams import stream_count
    from .train import TrainPlan

    figure_class()  # what the end needs is asked for at the start
    for path in request.prompts:
        if not path.is_file():
            raise RequestError(f"--prompts {path}: there is no such file")
    bundle = load(request.trunk, head="none")
    shared: dict[str, Any] = {
        "seed": request.seed, "levels": default_levels(bundle), "streams": stream_count(),
    }  # fmt: skip
    try:
        run(
            bundle,
            request.out,
            DataPlan(shards=request.shards, **shared),
            TrainPlan(
                steps=request.steps, depth=request.depth, vocabulary=request.trained_ids(), **shared
            ),
            prompts=request.prompts or PROMPTS,
            draft_ids=request.vocabulary,
            about=_about(request),
            clock=Clock(request.pause_after),
        )
    except Paused:
        return False
    head = read_head(request.out, bundle.trunk, bundle.provenance)
    command = _eval_command(request.out, request.trunk, request.each, 64)
    measured = replace(bundle, head=head, head_source=str(request.out))
    evaluate(measured, request.out, each=request.each, tokens=64, command=command)
    return True


def _about(request: Request) -> dict[str, str]:
    source = known(request.trunk)
    return {
        "command": request.command(),
        "model": _shown(request.trunk),
        "base_model": request.base_model
        or (source.hub_id if source else Path(request.trunk).resolve().name),
        "license": request.license or (source.licence if source else "other"),
    }


def _shown(path: str | Path) -> str:
    """A path as others may see it: its last part."""
    return Path(path).resolve().name


def _eval_command(folder: Path, model: str, each: int, tokens: int) -> str:
    words = ["mtplx", "forge", "eval", _shown(folder), "--model", _shown(model)]
    for name, value, default in (("--each", each, 12), ("--tokens", tokens, 64)):
        words += [] if value == default else [name, str(value)]
    return shlex.join(words)


def evaluate(folder: Path, model: str, *, each: int, tokens: int) -> dict[str, Any]:
    """Measure the head in ``folder`` with its trunk ``model``; what was written."""
    activate()
    from ..load import load
    from ..tokenizer import read_json
    from .card import MEASUREMENT
    from .run import evaluate as measure_in

    bundle = load(model, head=folder)
    command = _eval_command(folder, model, each, tokens)
    measure_in(bundle, folder, each=each, tokens=tokens, command=command)
    return read_json(folder / MEASUREMENT)
