"""How acceptance and speed depend on temperature and top-p; the law is exact at every point.

Acceptance is that of 3 drafts a round from the MTP head under the token rule, top-k off; the speed
that of the default, which drafts as many as pay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from .. import heldout
from ..environment import figure_class
from ..errors import RequestError
from ..load import Bundle
from ..measure import Way, label, side_by_side, summed
from ..progress import steps
from ..sampler_config import SamplerConfig
from .report import Report, markdown_table, number

TEMPERATURES = (0.0, 0.3, 0.6, 1.0, 1.5)
TOP_P = (0.5, 0.95, 1.0)
_EACH = 3
_TOKENS = 48
_ERROR = "_standard_error"
_SHOWN = {
    "acceptance_1": "acceptance at position 1",
    "acceptance_length": "acceptance length",
    "tokens_per_second": "tokens/s",
    "speed_vs_ar": "speed against AR",
}


def _key(name: str, temperature: float, top_p: float) -> str:
    return f"{name}_{label('t', temperature)}_{label('p', top_p)}"


@dataclass
class Grid(Report):
    """Figures by temperature and top-p."""

    def table(self) -> str:
        """One row for every point."""
        rows = [
            [f"{t:g}", f"{p:g}", *(self._shown(name, t, p) for name in _SHOWN)]
            for t in TEMPERATURES
            for p in TOP_P
        ]
        return markdown_table(["T", "top-p", *_SHOWN.values()], rows)

    def _shown(self, name: str, t: float, p: float) -> str:
        value = number(self.figures[_key(name, t, p)])
        error = self.figures.get(_key(name + _ERROR, t, p))
        return value if error is None else f"{value} ± {error:.2g}"

    def plot(self, path: Path) -> None:
        """Acceptance, acceptance length and speed over T, a line for every top-p, as a PNG."""
        shown = [name for name in _SHOWN if name != "tokens_per_second"]
        figure = figure_class()(figsize=(12, 3.6), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(shown)), shown, strict=True):
            for p in TOP_P:
                values = [self.figures[_key(name, t, p)] for t in TEMPERATURES]
                axes.plot(TEMPERATURES, values, marker="o", label=f"top-p {p:g}")
            axes.set(xlabel="temperature", title=_SHOWN[name])
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(path, dpi=150, format="png")


def run(bundle: Bundle, *, plot: Path | None = None) -> Grid:
    """Every point, with drafts and without, side by side on the same prompts."""
    if plot is not None:
        figure_class()
        if not plot.parent.is_dir():
            raise RequestError(f"--plot: there is no directory {plot.parent}")
    prompts = [text for name in heldout.SOURCES for text in heldout.chosen(name, _EACH)]
    ways = {
        "k3": Way(bundle, "mtp", 3),
        "auto": Way(bundle, "auto", "auto"),
        "ar": Way(bundle, "none", 0),
    }
    for way in ways.values():
        way.start(prompts[0], SamplerConfig(), tokens=8).result()
    # Greedy decoding does not know top-p.
    points = {(t, p if t > 0 else 1.0) for t in TEMPERATURES for p in TOP_P}
    with steps(len(points) * len(ways) * len(prompts)) as step:
        found = {point: _point(ways, prompts, *point, step) for point in sorted(points)}
    grid = Grid("exactness", {})
    for t in TEMPERATURES:
        for p in TOP_P:
            values = found[t, p if t > 0 else 1.0]
            grid.figures |= {_key(name, t, p): value for name, value in values.items()}
    grid.notes.append(
        f"{len(prompts)} prompts, {_TOKENS} tokens each; T = 0 is greedy and measured once"
    )
    if plot is not None:
        grid.plot(plot)
    return grid


def _point(
    ways: dict[str, Way], prompts: list[str], t: float, p: float, step: Callable[[str], None]
) -> dict[str, float | None]:
    sampling = SamplerConfig(temperature=t, top_p=p, top_k=0)
    found = side_by_side(
        ways,
        prompts,
        sampling,
        tokens=_TOKENS,
        before=lambda: step(f"T = {t:g}, top-p = {p:g}"),
    )
    drafted, auto, plain = (summed(found[way]) for way in ("k3", "auto", "ar"))
    kept = next(iter(drafted.acceptance_by_position), None)
    return {
        "acceptance_1": kept,
        "acceptance_1" + _ERROR: None
        if kept is None
        else sqrt(kept * (1 - kept) / drafted.drafted[0]),
        "acceptance_length": drafted.acceptance_length,
        "tokens_per_second": auto.tokens_per_second,
        "speed_vs_ar": auto.tokens_per_second / plain.tokens_per_second,
    }
