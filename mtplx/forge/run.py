"""A whole training: distil, train, write the head. Stopped anywhere, it goes on from there.

``OUT/work`` holds the plan, the data and the newest checkpoint; the finished head goes to ``OUT``,
with its measurement and its card.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .. import heldout
from ..draft_vocabulary import DraftVocabulary
from ..environment import machine, versions
from ..errors import RequestError
from ..head_file import read_config, write_head
from ..load import Bundle
from ..measure import measure, outputs_of
from ..mtp_patch import attach_head, headed_family
from ..progress import progress, steps
from ..provenance import replacing
from .card import MEASUREMENT, PLOT, TRAINING, write_card
from .conversation import Seed, read_seeds
from .data import Data
from .distil import DataPlan, distil, shard_path
from .fit import fit_copy_bonus, fit_sharpness
from .plot import plot_training
from .train import Trainer, TrainPlan
from .vocabulary import coverage

PROMPTS = tuple(sorted((Path(__file__).parent / "prompts").glob("*.jsonl")))
_SAVE_EVERY = 25  # steps


class Paused(Exception):  # noqa: N818 - not an error
    """The time that was given is over; the same command goes on."""


@dataclass
class Clock:
    """Time for one piece of a training; no limit if ``minutes`` is None."""

    minutes: float | None = None
    begin: float = field(default_factory=perf_counter)

    def check(self) -> None:
        """Raise ``Paused`` if the time is over."""
        if self.minutes is not None and perf_counter() - self.begin > 60 * self.minutes:
            raise Paused


def default_levels(bundle: Bundle) -> tuple[int, ...]:
    """The layers at a quarter, half and three quarters of the trunk's depth."""
    count = len(headed_family(bundle.trunk).layers)
    levels = {math.ceil(count * part / 4) for part in (1, 2, 3)}
    return tuple(sorted(levels - {count}))


def run(
    bundle: Bundle,
    out: Path,
    data_plan: DataPlan,
    train_plan: TrainPlan,
    *,
    prompts: Sequence[Path] = PROMPTS,
    draft_ids: int = 0,
    about: Mapping[str, Any],
    clock: Clock,
) -> None:
    """Distil and train into ``out``, and write the head; what is done already is not done again.

    draft_ids: how many of the most frequent ids the head drafts from, at most those that it was
    trained on; 0 for these.  about: "command", and for the card "model", "base_model" and
    "license".  Raises ``Paused``, ``RequestError`` where ``out`` holds a training of another plan,
    trunk or prompt files, and what the steps raise.
    """
    work = out / "work"
    seeds = [seed for path in prompts for seed in read_seeds(path)]
    plan = {
        "data": asdict(data_plan),
        "train": asdict(train_plan),
        "head": {"draft_ids": draft_ids},
        # Their order counts, and two may have one name.
        "prompts": {
            f"{i} {path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for i, path in enumerate(prompts, 1)
        },
        "trunk": bundle.provenance.sha256,
    }
    with _alone(work):
        _keep_plan(work / "plan.json", plan)
        forbidden = list(_forbidden(bundle))  # fetched before the long work, not after it
        paths, seconds = _distil(bundle, seeds, data_plan, work / "data", clock)
        data = Data(paths, headed_family(bundle.trunk).vocab_size, forbidden=forbidden)
        trainer = _train(bundle, data, train_plan, work / "checkpoint.safetensors", clock)
        clock.check()
        about = {**about, "distil_seconds": seconds}
        if draft_ids:
            trainer.head.vocabulary = DraftVocabulary(
                np.sort(trainer.order[:draft_ids]), data.vocab_size
            )
        _write(bundle, trainer, out, {**about, "plan": plan})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; ``RequestError`` if another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(f"{folder}: another training is running there") from None
        yield


def _keep_plan(path: Path, plan: dict[str, Any]) -> None:
    """Write the plan at the first start; later starts must have the same."""
    plan = json.loads(json.dumps(plan))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(plan, indent=1))
        return
    known = json.loads(path.read_text())
    changed = [
        f"{group} {name}"
        for group, fields in plan.items()
        for name in (fields.keys() | known.get(group, {}).keys()) - {"streams"}
        if fields.get(name) != known.get(group, {}).get(name)
    ]
    if changed:
        raise RequestError(
            f"{path.parent} holds a training with another {', '.join(sorted(changed))}:"
            " give the options it was started with, or another --out"
        )


def _forbidden(bundle: Bundle) -> Iterator[list[int]]:
    """The prompts that heads are measured on, as token ids."""
    for name in heldout.SOURCES:
        for text in heldout.texts(name):
            own = text.split("```python\n")[-1]  # the words around a problem are nobody's
            yield bundle.tokenizer.encode(own, add_special_tokens=False)


def _distil(
    bundle: Bundle, seeds: Sequence[Seed], plan: DataPlan, folder: Path, clock: Clock
) -> tuple[list[Path], float]:
    """The shards, and the seconds they took."""
    with progress() as bar:
        task = bar.add_task("distil (tokens)", total=plan.tokens)
        seconds = distil(
            bundle, seeds, plan, folder,
            on_progress=lambda tokens: bar.advance(task, tokens),
            before=clock.check,  # a shard that was begun is finished
        )  # fmt: skip
    return [shard_path(folder, number) for number in range(plan.shards)], seconds


def _train(bundle: Bundle, data: Data, plan: TrainPlan, checkpoint: Path, clock: Clock) -> Trainer:
    trainer = Trainer(bundle, data, plan)
    if checkpoint.exists():
        trainer.restore(checkpoint)
    with progress() as bar:
        task = bar.add_task("train (steps)", total=plan.steps, completed=trainer.step)
        while not trainer.done:
            _check_or_save(clock, trainer, checkpoint)
            known = len(trainer.log)
            trainer.advance()
            if trainer.step % _SAVE_EVERY == 0 or trainer.done:
                trainer.save(checkpoint)
            if len(trainer.log) > known:
                bar.console.print(f"step {trainer.step} of {plan.steps}: {trainer.summary()}")
            bar.update(task, completed=trainer.step)
    return trainer


def _check_or_save(clock: Clock, trainer: Trainer, checkpoint: Path) -> None:
    """Between two steps: only there is what a trainer holds a state to go on from."""
    try:
        clock.check()
    except Paused:
        trainer.save(checkpoint)
        raise


def _write(bundle: Bundle, trainer: Trainer, out: Path, known: dict[str, Any]) -> None:
    """The head, and what is known of its training."""
    head = trainer.head
    attached = attach_head(bundle.trunk, head)
    sharpness = fit_sharpness(attached, trainer.data, trainer.plan.depth)
    # The last norm's scale goes into the logits, and a further step's own norm takes it out again.
    head.norm.weight = head.norm.weight * sharpness
    head.copy_bonus = fit_copy_bonus(attached, trainer.data, trainer.plan.depth)
    write_head(out, trainer.head, bundle.trunk, bundle.provenance)
    family, data = headed_family(bundle.trunk), trainer.data
    facts = {
        "tokens": int(data.tokens.size),
        "sha256": data.sha256(),
        "rows_left_out": len(data.left_out),
        "rows_set_apart": data.set_apart,
        "coverage": coverage(family, data, trainer.head.vocabulary),
    }
    plot_training(trainer.log, out / PLOT)
    known = {
        **known,
        "data": facts,
        "training_seconds": trainer.seconds,
        "sharpness": sharpness,
        "head": read_config(out).sha256,
        "machine": machine(),
        "versions": versions(),
        "log": trainer.log,
    }
    with replacing(out / TRAINING) as temporary:
        temporary.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def evaluate(bundle: Bundle, folder: Path, *, each: int, tokens: int, command: str) -> None:
    """Measure the head of ``bundle``, which lies in ``folder``; write measurement.json and card.

    each: how many of the held-out prompts of each name.
    """
    prompts = {name: heldout.chosen(name, each) for name in heldout.SOURCES}
    with steps(outputs_of(sum(map(len, prompts.values())))) as step:
        found = measure(bundle, prompts, tokens=tokens, command=command, before=step)
    known = {**found.to_dict(), "head": read_config(folder).sha256}
    with replacing(folder / MEASUREMENT) as temporary:
        temporary.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if (folder / TRAINING).exists():
        write_card(folder)
