"""``mtplx certify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import (
    AnyTrunk,
    Blas,
    Head,
    Json,
    Seed,
    Temperature,
    TopK,
    TopP,
    Weights,
    open_model,
    prepare,
    read_file,
)
from .console import note, print_json, reported
from .fetch import DEFAULT_MODEL
from .sampler_config import SamplerConfig


def certify(
    model: Annotated[str, typer.Argument(help="As --model elsewhere.")] = DEFAULT_MODEL,
    delta: Annotated[float, typer.Option(help="Total variation to look for, <= 0.5.")] = 0.05,
    alpha: Annotated[float, typer.Option(help="The error of the verdict, either way.")] = 1e-3,
    minutes: Annotated[float, typer.Option(help="What is open by then stays so.")] = 15.0,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, a line each, not the usual ones.")
    ] = None,
    verify: Annotated[
        list[str] | None,
        typer.Option(metavar="token|block|coupled", help="A rule; repeat. All if none is given."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the certificate, and a page of plots.")
    ] = None,
    seed: Seed = None,
    temperature: Temperature = 0.6,
    top_p: TopP = 0.95,
    top_k: TopK = 20,
    as_json: Json = False,
    head: Head = "auto",
    any_trunk: AnyTrunk = False,
    weights: Weights = "auto",
    blas: Blas = "auto",
) -> None:
    """Check that this engine is exact: exit 0 certified, 3 refuted, 4 inconclusive."""
    with reported():
        given: dict[str, Any] = {"delta": delta, "alpha": alpha, "minutes": minutes, "seed": seed}
        given["sampling"] = SamplerConfig(temperature, top_p, top_k)
        if verify:
            given["rules"] = verify
        if prompts is not None:
            given["prompts"] = [line for line in read_file(prompts).splitlines() if line.strip()]
        prepare(blas)
        from .certify import report as page
        from .certify.certificate import EXIT_CODES
        from .certify.run import run

        if report is not None:
            page.check()
        found = run(open_model(model, weights, head=head, any_trunk=any_trunk), **given)
        print_json(found.to_dict()) if as_json else print("\n".join(page.lines(found)))
        for path in [] if report is None else page.write(found, report):
            note(f"wrote {path}")
        raise typer.Exit(EXIT_CODES[found.verdict])
