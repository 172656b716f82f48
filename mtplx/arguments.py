"""Arguments that several commands share, and how they open a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import console
from .blas import Choice, activate
from .errors import RequestError
from .fetch import lacks
from .options import DraftSource, RuleName, WeightsForm

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="The default's name, an mlx-lm directory, a .gguf file, or org/name(@revision) of the"
        " Hugging Face Hub.",
    ),
]
Blas = Annotated[Choice, typer.Option(help="BLAS for a Linux CPU; auto is the fastest there.")]
Weights = Annotated[
    WeightsForm,
    typer.Option(
        help="packed: as stored; float32: dequantised; auto: float32 on a CPU without kernels."
    ),
]
Head = Annotated[
    str,
    typer.Option(
        metavar="auto|none|PATH",
        help="A head's directory; auto: one beside the model, in it, or shipped for it.",
    ),
]
AnyTrunk = Annotated[
    bool, typer.Option("--any-trunk", help="Use a head of another trunk: slow at worst.")
]
Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="<= 0: greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus mass in (0, 1]; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Keep p >= min_p * max p; 0 is off.")]
Penalty = Annotated[float, typer.Option(help="Clamped to [-2, 2]; 0 is off.")]
Repetition = Annotated[float, typer.Option(help="> 0; 1 is off.")]
Bias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=AMOUNT", help="Added to a token's logit; -inf bans it. Repeat."),
]
Ban = Annotated[list[int] | None, typer.Option(metavar="ID", help="Bans a token. Repeat.")]
MinTokens = Annotated[int, typer.Option(help="No end of sequence before so many tokens.")]
JsonSchema = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The text is JSON of this schema.")
]
Regex = Annotated[str | None, typer.Option(metavar="RE", help="All of the text matches it.")]
Logprobs = Annotated[bool, typer.Option("--logprobs", help="With --json: log p of each token.")]
TopLogprobs = Annotated[int, typer.Option(help="With --logprobs: so many of the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Drawn and reported if not given.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="At most so many.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Ends the output and is not shown. Repeat."),
]
Draft = Annotated[
    DraftSource,
    typer.Option(help="auto: the MTP head if there is one, n-grams where they promise more."),
]
DraftModel = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="A smaller model to draft with; for draft auto or model."),
]
Depth = Annotated[
    str,
    typer.Option(metavar="K|auto", help="Most tokens drafted a round; auto: as many as pay."),
]
Verify = Annotated[
    RuleName | None,
    typer.Option(
        help="Default: coupled with --seed (the same text with and without drafts), else block."
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template.")]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Colour the text that came from drafts.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def prepare(blas: Choice) -> None:
    """Choose the BLAS, which must come before MLX is imported, and say so if it is a slow one."""
    status = activate(blas)
    if status.name == "reference" and blas != "reference":
        console.note(f"BLAS: {status.reason}")


def open_model(model: str, weights: str, *, head: str = "auto", any_trunk: bool = False) -> Any:
    """A bundle, downloaded first if need be."""
    if lacks(model):
        console.pull(model)
    with console.working(f"loading {model}"):
        from .load import load

        return load(model, weights=weights, head=head, any_trunk=any_trunk)


def read_file(path: Path) -> str:
    """Its text; ``RequestError`` where it has none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"{path} cannot be read: {e}") from None
