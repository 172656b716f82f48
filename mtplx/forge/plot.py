"""A training as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..environment import figure_class
from ..provenance import replacing


def plot_training(log: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Losses, and acceptance by draft depth, against the step, as a PNG. log: ``Trainer.log``'s.

    Raises ``MtplxError`` where matplotlib is not installed.
    """
    figure = figure_class()(figsize=(12, 5), dpi=100, layout="constrained")
    losses, acceptances = figure.subplots(1, 2)
    steps = [entry["step"] for entry in log]
    for key in ("training_loss", "held_out_loss"):
        losses.plot(
            steps, [entry[key] for entry in log], marker=".", label=key[:-5].replace("_", "-")
        )
    losses.set(xlabel="step", ylabel="loss (nats a token)")
    columns = zip(*(entry["held_out_acceptance"] for entry in log), strict=True)
    for depth, values in enumerate(columns, 1):
        acceptances.plot(
            steps, [100 * value for value in values], marker=".", label=f"depth {depth}"
        )
    acceptances.set(xlabel="step", ylabel="held-out acceptance (%)", ylim=(0, 100))
    for axes in (losses, acceptances):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    with replacing(path) as new:
        figure.savefig(new, format="png")
