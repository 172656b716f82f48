"""The command line: results to stdout, everything else to stderr.

Exit codes: 0 done, 1 it failed, 2 the command is wrong, 130 interrupted.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from . import __version__, console
from . import arguments as arg
from .arguments import open_model, prepare, read_file
from .blas import Choice, describe
from .certify_cli import certify
from .console import reported as _reported
from .errors import RequestError
from .fetch import DEFAULT_MODEL
from .forge_cli import app as forge
from .options import Options
from .sampler_config import SamplerConfig

app = typer.Typer(
    name="mtplx",
    help="Exact speculative decoding: the same text, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(forge)


BenchName = Literal["mtp", "exactness", "copy", "cpu", "law", "blas"]


def _bias(pairs: list[str]) -> dict[int, float] | None:
    out = {}
    for pair in pairs:
        token, found, amount = pair.partition("=")
        try:
            out[int(token)] = float(amount)
        except ValueError:
            found = ""
        if not found:
            raise RequestError(f"--logit-bias takes ID=AMOUNT, such as 42=-5, not {pair!r}")
    return out or None


def _depth(text: str) -> Any:
    """A number where it is one; ``Options`` judges the rest."""
    try:
        return int(text)
    except ValueError:
        return text


def _options(given: dict[str, Any]) -> Options:
    """The options of ``generate``, by the names of its parameters."""
    sampling = {f.name: given[f.name] for f in fields(SamplerConfig) if f.name in given}
    sampling["logit_bias"] = _bias(given["logit_bias"] or [])
    sampling["banned_ids"] = given["ban"] or ()
    options = {f.name: given[f.name] for f in fields(Options) if f.name in given}
    options |= {"depth": _depth(given["depth"]), "stop": tuple(given["stop"] or ())}
    if given["json_schema"] is not None:
        options["json_schema"] = read_file(given["json_schema"])
    if given["logprobs"] and not given["as_json"]:
        raise RequestError("--logprobs needs --json")
    try:
        return Options(SamplerConfig(**sampling), chat=not given["raw"], **options)
    except ValueError as e:
        raise RequestError(str(e)) from None


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise RequestError("no prompt: give one as argument, or - and text on standard input")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise RequestError(f"standard input is not UTF-8: {e}") from None


def _start(
    prompt: str, options: Options, blas: Choice, model: str, weights: str, **how: Any
) -> Any:
    prepare(blas)
    from .api import start

    bundle, small = open_model(model, weights, **how), options.draft_model
    if small is not None:
        options = replace(options, draft_model=open_model(str(small), weights, head="none"))
    if bundle.head_note and options.draft in ("auto", "mtp"):
        console.note(bundle.head_note)
    return start(bundle, prompt, options)


def _result(result: Any) -> dict[str, Any]:
    keys = ("text", "token_ids", "finish_reason", "seed")
    told = {**{key: getattr(result, key) for key in keys}, "stats": result.stats.to_dict()}
    if result.logprobs is not None:
        told["logprobs"] = [asdict(each) for each in result.logprobs]
    return told


@app.command()
def generate(
    prompt: arg.Prompt = None,
    model: arg.Model = DEFAULT_MODEL,
    temperature: arg.Temperature = 0.6,
    top_p: arg.TopP = 0.95,
    top_k: arg.TopK = 20,
    min_p: arg.MinP = 0.0,
    presence_penalty: arg.Penalty = 0.0,
    frequency_penalty: arg.Penalty = 0.0,
    repetition_penalty: arg.Repetition = 1.0,
    logit_bias: arg.Bias = None,
    ban: arg.Ban = None,
    seed: arg.Seed = None,
    max_tokens: arg.MaxTokens = 256,
    min_tokens: arg.MinTokens = 0,
    stop: arg.Stop = None,
    json_schema: arg.JsonSchema = None,
    regex: arg.Regex = None,
    logprobs: arg.Logprobs = False,
    top_logprobs: arg.TopLogprobs = 0,
    draft: arg.Draft = "auto",
    draft_model: arg.DraftModel = None,
    depth: arg.Depth = "auto",
    verify: arg.Verify = None,
    raw: arg.Raw = False,
    as_json: arg.Json = False,
    show_drafts: arg.ShowDrafts = False,
    head: arg.Head = "auto",
    any_trunk: arg.AnyTrunk = False,
    weights: arg.Weights = "auto",
    blas: arg.Blas = "auto",
) -> None:
    """Generate text from a prompt: exactly what plain decoding would say, only faster."""
    given = locals()
    with _reported():
        options = _options(given)
        how = {"head": head, "any_trunk": any_trunk}
        stream = _start(_read_prompt(prompt), options, blas, model, weights, **how)
        if as_json:
            console.print_json(_result(stream.result()))
        else:
            console.stream_text(stream, show_drafts=show_drafts)
            console.summarise(stream.result())
        doubt = stream.result().stats.head_doubt
        if doubt:
            console.note(doubt)


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(help="A known name, org/name or org/name@revision.")
    ] = DEFAULT_MODEL,
    verify: Annotated[bool, typer.Option("--verify", help="Check the digests again.")] = False,
) -> None:
    """Download a model and print its path.

    A known name comes through the machine's own pip settings. org/name is the newest commit of a
    model of the Hugging Face Hub, org/name@revision that of a branch or tag, or a commit itself:
    its safetensors, configuration and tokenizer, checked, in the cache that huggingface_hub uses.
    """
    with _reported():
        print(console.pull(model, verify=verify))


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(help="A known name, a directory, a .gguf file or org/name.")
    ],
    as_json: arg.Json = False,
) -> None:
    """Say what a model is, whose each of its tensors is and what would run; reads no weights.

    Exit code 1 if tensors do not fit.
    """
    with _reported():
        prepare("auto")
        from .inspection import BROKEN
        from .inspection import inspect as inspect_model

        found = inspect_model(model)
        info = {**found.to_dict(), "blas": describe()}
        console.print_json(info) if as_json else console.print_model(info)
        if found.verdict == BROKEN:
            console.error(found.why)
            raise typer.Exit(1)


@app.command()
def convert(
    model: Annotated[
        str, typer.Argument(metavar="HF_DIR", help="A directory as its makers publish it.")
    ],
    out: Annotated[Path, typer.Option(help="A directory to be made.")],
    bits: Annotated[
        int | None, typer.Option("--bits", "-q", help="Pack matrices into so many bits.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale.")] = 64,
    head_bits: Annotated[int | None, typer.Option(help="The MTP head's; as --bits.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float16, bfloat16 or float32; as config.json says.")
    ] = None,
) -> None:
    """Convert a model to MLX and keep its MTP head; mlx-lm loads the result, too."""
    with _reported():
        prepare("auto")
        from .convert import convert as convert_model

        with console.byte_bar("converting") as report:
            made = convert_model(
                model, out, bits=bits, group_size=group_size, head_bits=head_bits, dtype=dtype,
                on_progress=report,
            )  # fmt: skip
        if made.note:
            console.note(made.note)
        print(made.path)


@app.command()
def bench(
    name: Annotated[
        BenchName,
        typer.Argument(
            help="mtp: the MTP head, on held-out prompts; exactness: acceptance and speed over"
            " temperature and top-p; copy: n-gram drafts and plain decoding against AR and mlx-lm;"
            " cpu: decoding on a CPU against mlx-lm and llama.cpp, and what bounds it;"
            " law: logits to p against mlx-lm's sampler; blas: float32 products against stock MLX."
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="For the first four: another model.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="For mtp and cpu: all prompts.")] = False,
    plot: Annotated[Path | None, typer.Option(help="For exactness: a PNG to write.")] = None,
    as_json: arg.Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    head: arg.Head = "auto",
    any_trunk: arg.AnyTrunk = False,
    blas: arg.Blas = "auto",
) -> None:
    """Measure ratios side by side on this machine. Run it with nothing else running."""
    with _reported():
        if as_json and markdown:
            raise RequestError("--json or --markdown, not both")
        prepare(blas)
        from .bench import run

        given: dict[str, Any] = {"head": head, "any_trunk": any_trunk}
        opened = partial(open_model, **given)
        report = run(name, model=model, blas=blas, full=full, plot=plot, open_model=opened, **given)
        if as_json:
            console.print_json(report.to_dict())
        else:
            print(report.markdown()) if markdown else console.print_report(report)


@app.command()
def tune(
    model: arg.Model = DEFAULT_MODEL,
    as_json: arg.Json = False,
    head: arg.Head = "auto",
    any_trunk: arg.AnyTrunk = False,
    weights: arg.Weights = "auto",
    blas: arg.Blas = "auto",
) -> None:
    """Measure what drafts cost here, with nothing else running; --depth auto then chooses by it."""
    with _reported():
        prepare(blas)
        bundle = open_model(model, weights, head=head, any_trunk=any_trunk)
        from . import costs
        from .progress import steps

        with steps(costs.PASSES) as step:
            found = costs.measure(bundle, lambda: step("measuring"))
        path = costs.store(bundle, found)
        if as_json:
            told: dict[str, Any] = {}
            for part in ("forward", "draft", "start"):
                told[f"{part}_seconds"] = getattr(found, part)
                told[part] = getattr(found.relative(), part)
            console.print_json({**told, "stored": str(path)})
        else:
            console.print_costs(found, costs.ROWS, path)


@app.command()
def compare(
    prompt: Annotated[str | None, typer.Argument(help="Yours, or a text to correct.")] = None,
    model: arg.Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n")] = 160,
    temperature: arg.Temperature = 0.6,
    seed: Annotated[int, typer.Option(help="The same for both.")] = 1,
    head: arg.Head = "auto",
    any_trunk: arg.AnyTrunk = False,
    weights: arg.Weights = "auto",
    blas: arg.Blas = "auto",
) -> None:
    """Decode one prompt with and without drafts under one seed, side by side."""
    with _reported():
        sampling = SamplerConfig(temperature=temperature)
        prepare(blas)
        from .compare import PROMPT, run

        bundle = open_model(model, weights, head=head, any_trunk=any_trunk)
        given = PROMPT if prompt is None else _read_prompt(prompt)
        run(bundle, given, sampling=sampling, max_tokens=max_tokens, seed=seed)


app.command()(certify)


def _version(asked: bool) -> None:
    if asked:
        print(f"mtplx {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the ``mtplx`` command."""
    app()


if __name__ == "__main__":
    main()
