"""What ``mtplx forge train`` and ``mtplx forge eval`` do, given their options."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
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
    shards: int = 3
    steps: int = 1400
    depth: int = 3
    vocabulary: int = 16384
    seed: int = 0
    pause_after: float | None = None
    each: int = 12
    base_model: str | None = None
    license: str | None = None

    def command(self) -> str:
        """The command line that makes the same head, without what has no influence on it."""
        words = ["mtplx", "forge", "train", self.trunk, "--out", self.out.name, *self._given()]
        return shlex.join(words)

    def _given(self) -> Iterator[str]:
        for entry in fields(self)[3:8]:
            if getattr(self, entry.name) != entry.default:
                yield from (f"--{entry.name}", str(getattr(self, entry.name)))
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
                steps=request.steps, depth=request.depth, vocabulary=request.vocabulary, **shared
            ),
            prompts=request.prompts or PROMPTS,
            about=_about(request),
            clock=Clock(request.pause_after),
        )
    except Paused:
        return False
    head = read_head(request.out, bundle.trunk, bundle.provenance)
    command = shlex.join(["mtplx", "forge", "eval", request.out.name, "--model", request.trunk])
    measured = replace(bundle, head=head, head_source=str(request.out))
    evaluate(measured, request.out, each=request.each, tokens=64, command=command)
    return True


def _about(request: Request) -> dict[str, str]:
    source = known(request.trunk)
    return {
        "command": request.command(),
        "model": request.trunk if source else Path(request.trunk).name,
        "base_model": request.base_model
        or (source.hub_id if source else Path(request.trunk).resolve().name),
        "license": request.license or (source.licence if source else "other"),
    }


def evaluate(
    folder: Path, model: str, *, each: int, tokens: int, any_trunk: bool
) -> dict[str, Any]:
    """Measure the head in ``folder`` with its trunk ``model``; what was written."""
    activate()
    from ..load import load
    from ..tokenizer import read_json
    from .card import MEASUREMENT
    from .run import evaluate as measure_in

    bundle = load(model, head=folder, any_trunk=any_trunk)
    words = ["mtplx", "forge", "eval", folder.name, "--model", model, "--each", str(each)]
    measure_in(bundle, folder, each=each, tokens=tokens, command=shlex.join(words))
    return read_json(folder / MEASUREMENT)
