"""``mtplx forge``: making MTP heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import note, print_json, reported
from .fetch import DEFAULT_MODEL

app = typer.Typer(
    name="forge",
    help="Train, measure and publish MTP heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="TRUNK", help="The default's name, an mlx-lm directory, a .gguf file or org/name."
    ),
]
Each = Annotated[
    int, typer.Option(min=1, help="Held-out prompts to measure on, of MT-bench and of HumanEval.")
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The head's directory.")]


@app.command()
def train(
    trunk: Model,
    out: Annotated[Path, typer.Option(help="Where the head goes; OUT/work goes on from a stop.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Seeds of the data: a text file, one a line, or .jsonl. Repeat."),
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="Data: 81,920 tokens each.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of 1,536 rows.")] = 3300,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Draft steps trained for.")] = 3,
    vocabulary: Annotated[
        int, typer.Option(min=0, help="Draft from so many ids, the most frequent; 0: all.")
    ] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Of data and training.")] = 0,
    pause_after: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after so many minutes, exit code 75; run it again."),
    ] = None,
    each: Each = 12,
    base_model: Annotated[
        str | None, typer.Option(help="The trunk's name on the Hub, for the card.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Of the head, for the card.")] = None,
) -> None:
    """Train a head: the trunk writes data, the head learns its law, both are measured."""
    with reported():
        from .forge.command import Request
        from .forge.command import train as run

        request = Request(
            trunk, out, tuple(prompts or ()), shards, steps, depth, vocabulary, seed, pause_after,
            each, base_model, license,
        )  # fmt: skip
        if run(request):
            print(out)
        else:
            note(f"paused: the same command goes on from {out / 'work'}")
            raise typer.Exit(75)  # as sysexits.h has it: try again


@app.command("eval")
def evaluate(
    folder: Folder,
    model: Annotated[str, typer.Option("--model", "-m", help="Its trunk.")] = DEFAULT_MODEL,
    each: Each = 12,
    tokens: Annotated[int, typer.Option(min=2, help="Of each output.")] = 64,
) -> None:
    """Measure a head against plain decoding; writes measurement.json and the card."""
    with reported():
        from .forge.command import evaluate as run

        print_json(run(folder, model, each=each, tokens=tokens)["figures"])


@app.command()
def card(folder: Folder) -> None:
    """Write the model card from training.json and measurement.json."""
    with reported():
        from .forge.card import write_card

        print(write_card(folder))


@app.command()
def publish(
    folder: Folder,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Such as name/head.")],
    private: Annotated[bool, typer.Option("--private", help="If it has to be made.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the files; contact nobody.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="A branch other than main.")] = None,
) -> None:
    """Upload a head to the Hugging Face Hub (HF_ENDPOINT, HF_TOKEN)."""
    with reported():
        from .forge.publish import publish as upload

        files = upload(folder, repo, private=private, dry_run=dry_run, revision=revision)
        for name, size in files.items():
            print(f"{name:<16} {size:>11} bytes")
        print(f"{'would go to' if dry_run else 'are now in'} {repo}")
