"""What a benchmark prints: figures, the command, versions and the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from ..environment import machine, versions


@dataclass
class Report:
    """One benchmark's result.

    figures: name -> number, None where it could not be measured.  notes: lines for people, such
    as which outputs were left out and why.
    """

    name: str
    figures: dict[str, float | None]
    command: str = ""
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)
    machine: dict[str, str] = field(default_factory=machine)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return vars(self)

    def markdown(self) -> str:
        """For a document: the table, and what it was measured on."""
        what = {**self.machine, **self.versions}
        return f"{self.table()}\n\n{', '.join(f'{k} {v}' for k, v in what.items())}"

    def table(self) -> str:
        """The figures in Markdown."""
        rows = [[name, number(value)] for name, value in self.figures.items()]
        return markdown_table(["figure", "value"], rows)


def number(value: float | None) -> str:
    """For people: four digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def alternate(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each call, run in turn so that all see the same machine."""
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(repeats):
        for i, call in enumerate(calls):
            begin = perf_counter()
            call()
            seconds[i].append(perf_counter() - begin)
    return [median(column) for column in seconds]
