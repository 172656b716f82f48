"""What a person sees: streamed text, progress, tables. Everything but results goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .errors import MtplxError, RequestError

if TYPE_CHECKING:
    from .api import Generation, Stream
    from .bench.report import Report
    from .depth import Costs

DRAFT_STYLE = "green underline"


def _err() -> Console:
    return Console(stderr=True, highlight=False)


def error(message: str) -> None:
    """One line that says what went wrong."""
    _err().print(Text(f"mtplx: {message}", style="red"), soft_wrap=True)


def note(message: str) -> None:
    """One line that is worth knowing."""
    _err().print(Text(f"mtplx: {message}", style="dim"), soft_wrap=True)


@contextmanager
def reported() -> Iterator[None]:
    """Turn what goes wrong into one line on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        error("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output has gone: nothing is left to say to it.
        sys.stderr.close()
        raise typer.Exit(1) from None
    except RequestError as e:
        error(str(e))
        raise typer.Exit(2) from None
    except (MtplxError, OSError) as e:
        error(str(e))
        raise typer.Exit(1) from None


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something is going on."""
    console = _err()
    if console.is_terminal:
        with console.status(escape(what)):
            yield
    else:
        yield


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False))


def print_fields(fields: Mapping[str, Any]) -> None:
    """Names and values, a line each."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"{name.replace('_', ' '):<{width}}  {'-' if shown is None else shown}")


def print_model(info: Mapping[str, Any]) -> None:
    """What ``inspect`` found: what does not apply is left out, ignored tensors by their reasons."""
    patterns: dict[str, list[str]] = {}
    for pattern, reason in info["ignored"].items():
        patterns.setdefault(reason, []).append(pattern)
    shown = {name: value for name, value in info.items() if value not in ("", (), {}, [])}
    shown.pop("ignored", None)
    for key in ("mtp_files", "broken_tensor") if info["broken_tensor"] is None else ("why",):
        shown.pop(key, None)  # said in another line, or as an error
    print_fields(shown)
    for reason, names in patterns.items():
        print(f"ignored, {reason}:", *names, sep="\n  ")


@contextmanager
def byte_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; what it gives takes (bytes done, bytes in all)."""
    console, columns = _err(), (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def pull(model: str, *, verify: bool = False) -> Path:
    """Download a model with a progress bar; its path."""
    from . import fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=_err(), transient=True)
    with ExitStack() as shown:

        def report(done: int, total: int) -> None:
            if not bar.tasks:
                size = f"{total / 1e6:.0f} MB"
                note(f"downloading {model}, {size}, once; `mtplx pull --help` says more")
                shown.enter_context(bar).add_task("download")
            bar.update(bar.task_ids[0], completed=done, total=total)

        path = fetch.pull(model, on_progress=report, verify=verify)
    if fetch.repository(model):
        note(f"this is {fetch.origin(model, path)}")
    return path


def stream_text(stream: Stream, *, show_drafts: bool = False) -> None:
    """Print text as it comes, on stdout; drafted pieces coloured if asked for."""
    console = Console(highlight=False)
    for chunk in stream:
        for segment in chunk.segments:
            if show_drafts and segment.from_draft:
                console.print(Text(segment.text, style=DRAFT_STYLE), end="", soft_wrap=True)
            else:
                sys.stdout.write(segment.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def describe_acceptance(positions: list[float]) -> str:
    """Acceptance by draft position as percentages."""
    return " ".join(f"{100 * share:.0f}%" for share in positions) or "no drafts"


def describe_sources(sources: Mapping[str, Mapping[str, int]]) -> str:
    """Rounds by the drafter that drafted in them."""
    return ", ".join(f"{name} {counts['rounds']}" for name, counts in sources.items()) + " rounds"


def summarise(result: Generation) -> None:
    """One dim line of figures after the text."""
    stats = result.stats
    count = "1 token" if stats.tokens == 1 else f"{stats.tokens} tokens"
    costs = stats.costs or {}
    chosen = f"{stats.depth}, {costs['from']} costs" if costs else stats.depth
    note(
        f"{count}, {stats.tokens_per_second:.1f} tokens/s;"
        f" drafts: {describe_sources(stats.sources)}, {stats.acceptance_length:.2f} tokens a round"
        f" ({describe_acceptance(stats.acceptance_by_position)}); depth {chosen};"
        f" rule {stats.rule}, seed {result.seed}; {result.finish_reason}"
    )
    if "note" in costs:
        note(costs["note"])


def print_costs(costs: Costs, rows: Sequence[int], path: Path) -> None:
    """What a round over so many rows costs, but for its drafts, and a step of the head."""
    relative = costs.relative()
    pairs = [
        (f"a round over {n} rows", costs.forward[n - 1], relative.forward[n - 1]) for n in rows
    ]
    if costs.draft:
        pairs.append(("a draft of the head", costs.draft, relative.draft))
        pairs.append(("a round's first one, besides", costs.start, relative.start))
    table = [[name, f"{1e3 * seconds:.2f}", f"{ratio:.2f}"] for name, seconds, ratio in pairs]
    print_table("mtplx tune", ["what", "ms", "against 1 row"], table)
    print(f"stored in {path}; --depth auto chooses by it")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A small table on stdout."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def print_report(report: Report) -> None:
    """A benchmark's figures, and what they were measured with."""
    from .bench.report import number

    rows = [[name, number(value)] for name, value in report.figures.items()]
    print_table(f"mtplx bench {report.name}", ["figure", "value"], rows)
    for line in report.notes:
        print(line)
    print_fields({**report.machine, **report.versions, "command": report.command})
