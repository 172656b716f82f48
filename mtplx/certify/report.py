"""The certificate as files: ``certificate.json``, and one page with plots, ``certificate.png``."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from ..environment import figure_class
from ..provenance import replacing
from .certificate import Certificate

# Total variations of 0 have no place on a logarithmic axis.
_LOWEST = 1e-18
_WIDTH = 118


def check() -> None:
    """Raise ``MtplxError`` where plots cannot be drawn, before anything has run."""
    figure_class()


def write(found: Certificate, folder: Path) -> list[Path]:
    """Write both files into ``folder``, which is made if need be; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "certificate.json", folder / "certificate.png"
    with replacing(data) as new:
        new.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
    figure = figure_class()(figsize=(8.3, 11.7), dpi=120, layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1.15, 1, 1))
    words = figure.add_subplot(grid[0, :])
    words.axis("off")
    words.text(0, 1, "\n".join(lines(found)), va="top", family="monospace", fontsize=6.5)
    words.set_title(f"mtplx: {found.verdict}", loc="left", fontweight="bold")
    _wealth(figure.add_subplot(grid[1, 0]), found)
    _laws(figure.add_subplot(grid[1, 1]), found)
    _tuples(figure.add_subplot(grid[2, 0]), found)
    _drift(figure.add_subplot(grid[2, 1]), found)
    with replacing(page) as new:
        figure.savefig(new, format="png")
    return [data, page]


def lines(found: Certificate) -> list[str]:
    """The certificate in words, for people."""
    told = found.to_dict()
    replay, drift, model = found.replay, told["drift"], told["model"]
    out = [
        f"verdict     {found.verdict}",
        *(f"refuted by  {line}" for line in found.refuted_by),
        *(f"open        {line}" for line in found.open_questions),
        f"joint law   {sum(map(len, found.joint_laws.values()))} cases enumerated,"
        f" largest total variation {_number(told['joint_law_tv'])}",
        f"seed replay {replay.identical} of {replay.runs} coupled outputs are plain decoding's,"
        f" {replay.near_ties} differ by a near-tie",
    ]
    for rule, bets in found.bets.items():
        out.append(
            f"bets        {rule}: {bets.decision or 'undecided'} after {bets.tokens} bets on"
            f" {found.tokens[rule]} tokens; wealth"
            f" {_power(bets.log_wealth)} (leak), {_power(-bets.log_wealth)} (exact)"
        )
    for rule, test in found.chi_square.items():
        out.append(
            f"chi-square  {rule}: {test.runs} tuples, {test.bins} bins,"
            f" {_number(test.statistic)}, p = {test.p_value:.3g}"
        )
    out += [
        f"drift       {drift['equal']} of {drift['positions']} rows of logits are plain decoding's;"
        f" largest difference {_number(drift['max'])}, {drift['argmax_flips']} argmax flips",
        f"errors      alpha {found.alpha:g} in all, {found.level:.2g} a test;"
        f" delta {found.delta:g} (total variation)",
        f"law         T = {found.sampling.temperature:g}, top-p {found.sampling.top_p:g},"
        f" top-k {found.sampling.top_k}; first seed {found.seed}",
        f"model       {model['source']}, {model['runs']}",
        *(f"            {name} {digest}" for name, digest in model["sha256"].items()),
        f"head        {_head(model['head'])}",
        f"device      {told['device']}, {', '.join(told['machine'].values())}",
        f"versions    {', '.join(f'{k} {v}' for k, v in told['versions'].items())}",
        f"seconds     {', '.join(f'{k} {v:g}' for k, v in told['seconds'].items())}",
    ]
    return [line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..." for line in out]


def _head(head: dict[str, Any] | None) -> str:
    if head is None:
        return "none"
    named = {"model": "the model's own", None: "given"}
    return head["sha256"] or named.get(head["source"], head["source"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _power(log_wealth: float) -> str:
    return f"1e{log_wealth / log(10):+.1f}"


def _tidy(axes: Any, title: str, **labels: str) -> None:
    axes.set(title=title, **labels)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=7)


def _wealth(axes: Any, found: Certificate) -> None:
    for rule, bets in found.bets.items():
        path = np.array([0.0, *bets.path]) / log(10)
        axes.plot(np.clip(path, -50, 50), label=rule, linewidth=1)
    bound = -log(found.level) / log(10)
    for place, word in ((bound, "refuted"), (-bound, "certified")):
        axes.axhline(place, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(word, (1, place), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    _tidy(axes, "bets on a leak", xlabel="tokens bet on", ylabel="log10 of the wealth")


def _laws(axes: Any, found: Certificate) -> None:
    for rule, laws in found.joint_laws.items():
        axes.semilogy(sorted(max(d, _LOWEST) for d in laws.values()), ".", label=rule)
    axes.axhline(1e-12, color="grey", linewidth=0.8, linestyle="--")
    _tidy(axes, "enumerated joint laws", xlabel="case, in order", ylabel="total variation")


def _tuples(axes: Any, found: Certificate) -> None:
    for rule, counts in found.tuples.items():
        axes.plot(counts["observed"], ".", label=rule)
    if found.tuples:
        rule, counts = next(iter(found.tuples.items()))
        axes.plot(counts["expected"], color="grey", linewidth=0.8, label=f"expected ({rule})")
    _tidy(axes, "first three tokens", xlabel="tuple, likeliest first", ylabel="outputs")


def _drift(axes: Any, found: Certificate) -> None:
    gaps = np.sort(found.drift.largest)
    if gaps.size:
        axes.plot(gaps, np.arange(1, gaps.size + 1) / gaps.size, drawstyle="steps-post")
    _tidy(
        axes, "logits, verified against plain", xlabel="largest difference", ylabel="share of rows"
    )
