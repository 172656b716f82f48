"""Step 2 of a training: the head alone, against the trunk's distribution. The trunk is frozen.

Matrices are trained with Muon (Jordan 2024), vectors with AdamW. What a step does is a function of
plan, data and its number; a checkpoint holds everything else.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..cpu_head import rounded
from ..draft_vocabulary import DraftVocabulary
from ..errors import ModelFileError, MtplxError, RequestError
from ..load import Bundle
from ..mtp_patch import AttachedHead, MTPHead, attach_head, headed_family, new_head
from ..precision import to_float32
from ..provenance import replacing
from .data import Batch, Data
from .muon import Muon
from .objective import Objective, losses
from .streams import shares, side_by_side
from .vocabulary import StepVocabulary, ranked


@dataclass(frozen=True)
class TrainPlan:
    """What the weights are a function of, besides trunk and data.

    rows, window: of a batch, in sequences and draft rows of each.  depth: draft steps unrolled from
    step ``second`` * steps on, with the ``Objective`` of ``temperature`` and ``acceptance``;
    before, one step and plain cross-entropy.  matrix_rate, vector_rate: learning rates of Muon and
    AdamW, rising over ``warmup`` steps, falling linearly to 0 over the last ``decay`` share.
    vocabulary: how many ids the laws are compared on, the most frequent of the data; 0 is all.
    core, drawn: how many of those a step takes: the most frequent, and some of the others.
    packed: whether matrices count as the CPU kernels round them from step ``second`` * steps on;
    checks are of the head as it is.
    """

    seed: int = 0
    steps: int = 3300
    rows: int = 12
    window: int = 128
    depth: int = 3
    second: float = 0.7
    temperature: float = 0.7
    acceptance: float = 2.0
    matrix_rate: float = 0.06
    vector_rate: float = 1e-3
    warmup: int = 40
    decay: float = 0.5
    vocabulary: int = 16384
    core: int = 2048
    drawn: int = 2048
    levels: tuple[int, ...] = ()
    packed: bool = True
    streams: int = 2
    check_every: int = 100

    def unrolled(self, step: int) -> bool:
        """Whether a step is one of the last, which ``second`` divides from the others."""
        return step >= self.second * self.steps

    def depth_at(self, step: int) -> int:
        """Draft steps unrolled in a step."""
        return self.depth if self.unrolled(step) else 1

    def objective_at(self, step: int) -> Objective:
        """What a step minimises."""
        return Objective(self.temperature, self.acceptance) if self.unrolled(step) else Objective()

    def rate_at(self, step: int) -> float:
        """The share of the learning rates that a step takes."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, (step + 1) / self.warmup, left)


def initial_head(bundle: Bundle, plan: TrainPlan, vocabulary: DraftVocabulary | None) -> MTPHead:
    """A head that starts as the trunk's last layer, run once more on the trunk's hidden state."""
    head = new_head(bundle.trunk, levels=plan.levels, vocabulary=vocabulary)
    head.layer = to_float32(copy.deepcopy(headed_family(bundle.trunk).layers[-1]))
    size = head.fc.weight.shape[0]
    weight = np.zeros(head.fc.weight.shape, np.float32)
    weight[:, size : 2 * size] = np.eye(size)
    head.fc.weight = mx.array(weight)
    head.set_dtype(mx.float32)
    mx.eval(head)  # not its parameters alone: a rope's frequencies are none
    return head


def _optimiser() -> optimizers.MultiOptimizer:
    matrices = Muon(learning_rate=0.0)
    vectors = optimizers.AdamW(learning_rate=0.0, weight_decay=0.0, betas=[0.9, 0.98])
    return optimizers.MultiOptimizer([matrices, vectors], [lambda _, weight: weight.ndim == 2])


class Trainer:
    """A training between two steps.

    log: one entry every ``check_every`` steps, and at the end.  order: the ids that laws are
    compared on, the most frequent first.
    """

    def __init__(self, bundle: Bundle, data: Data, plan: TrainPlan):
        self.data, self.plan = data, plan
        family = headed_family(bundle.trunk)
        order = ranked(family, data, bundle.tokenizer.eos_ids)
        self.order = order[: plan.vocabulary or family.vocab_size]
        vocabulary = DraftVocabulary(np.sort(self.order), family.vocab_size)
        self.head = initial_head(bundle, plan, vocabulary if plan.vocabulary else None)
        self.attached = attach_head(bundle.trunk, self.head)
        # One head a stream: to take a gradient writes into the module that it is taken of.
        copies = [copy.deepcopy(self.head) for _ in range(plan.streams)]
        self._copies = [attach_head(bundle.trunk, head) for head in copies]
        self._all_rows = family.output_rows(vocabulary.ids)
        self._ids = StepVocabulary(self.order, plan.core, plan.drawn, plan.seed)
        self.step = 0
        self.log: list[dict[str, Any]] = []
        self._optimiser = _optimiser()
        self._optimiser.init(self.head.trainable_parameters())
        self.seconds = 0.0
        self._sums = np.zeros(2)

    @property
    def done(self) -> bool:
        """Whether every step has been taken."""
        return self.step >= self.plan.steps

    def summary(self) -> str:
        """The last check, in words."""
        last = self.log[-1]
        shares = " ".join(f"{100 * share:.0f}%" for share in last["held_out_acceptance"])
        return f"held-out loss {last['held_out_loss']:.3f}, acceptance by depth {shares}"

    def advance(self) -> None:
        """One step; and a check of the held-out rows, where one is due."""
        begin, plan = perf_counter(), self.plan
        depth = plan.depth_at(self.step)
        batch = self.data.batch(plan.rows, plan.window + depth, plan.seed, self.step)
        share = plan.rate_at(self.step)
        matrices, vectors = self._optimiser.optimizers
        matrices.learning_rate = plan.matrix_rate * share
        vectors.learning_rate = plan.vector_rate * share
        loss, gradients = self._gradients(batch, depth)
        self._optimiser.update(self.head, gradients)
        mx.eval(self.head.parameters(), self._optimiser.state, loss)
        value = float(loss)
        if not isfinite(value):
            raise MtplxError(f"the loss is {value} in step {self.step}: the training has diverged")
        self.step += 1
        self._sums += (value, 1)
        self.seconds += perf_counter() - begin
        if self.step % plan.check_every == 0 or self.done:
            self._check()

    def _gradients(self, batch: Batch, depth: int) -> tuple[mx.array, Any]:
        """Mean loss of a batch and its gradient, the sequences shared between the streams."""
        weight = batch.weights[:, 1:].sum() * depth + 1e-6
        compare = self.plan.objective_at(self.step)
        output = self.attached.family.output_rows(self._ids.ids(self.step))
        outputs, parameters = (output, output), self.head.trainable_parameters()
        if self.plan.packed and self.plan.unrolled(self.step):
            # Gradients are taken here, and change what has not been rounded: the straight-through
            # estimator (Bengio et al., arXiv 1308.3432).
            parameters = tree_map(lambda w: rounded(w) if w.ndim == 2 else w, parameters)
            if self.head.vocabulary is not None:  # else the trunk's own output head drafts
                outputs = output, rounded(output)
        mx.eval(weight, outputs, parameters)  # all that the streams share

        def loss_of(attached: AttachedHead, part: Batch) -> mx.array:
            parts = (part.features, part.tokens, part.weights, outputs)
            return losses(attached, *parts, depth, compare)[0] / weight

        def work(item: tuple[AttachedHead, slice]) -> Any:
            attached, share = item
            attached.head.update(parameters)
            found = nn.value_and_grad(attached.head, partial(loss_of, attached))(batch.part(share))
            mx.eval(found)
            return found

        parts = shares(len(batch.tokens), self.plan.streams)
        found = side_by_side(work, list(zip(self._copies, parts, strict=False)))
        loss, gradients = found[0]
        for more, others in found[1:]:
            loss, gradients = loss + more, tree_map(mx.add, gradients, others)
        return loss, gradients

    def _check(self) -> None:
        depth = self.plan.depth
        batch = self.data.check(min(self.plan.window + depth, self.data.length))
        parts = (batch.features, batch.tokens, batch.weights, (self._all_rows,) * 2)
        total, accepted, mass = losses(self.attached, *parts, depth, Objective())
        mx.eval(total, accepted, mass)
        loss, count = self._sums
        self.log.append(
            {
                "step": self.step,
                "depth": self.plan.depth_at(self.step - 1),
                "training_loss": float(loss / count),
                "held_out_loss": float(total / mass.sum()),
                "held_out_acceptance": [float(x) for x in accepted / mass],
                "seconds": self.seconds,
            }
        )
        self._sums = np.zeros(2)

    # --- checkpoints ---

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        head: Any = tree_flatten(self.head.trainable_parameters())
        optimiser: Any = tree_flatten(self._optimiser.state)
        arrays = {f"head.{k}": v for k, v in head} | {f"optimiser.{k}": v for k, v in optimiser}
        state = {
            "plan": asdict(self.plan),
            "data": self.data.sha256(),
            "step": self.step,
            "log": self.log,
            "sums": self._sums.tolist(),
            "seconds": self.seconds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            mx.save_safetensors(str(temporary), arrays, {"state": json.dumps(state)})

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint; ``RequestError`` if it is of another plan or other data."""
        try:
            loaded: Any = mx.load(str(path), return_metadata=True)
            arrays, metadata = loaded
            state = json.loads(metadata["state"])
        except (RuntimeError, KeyError, ValueError) as e:
            raise ModelFileError(f"{path}: not a checkpoint of a training ({e})") from e
        plan = json.loads(json.dumps(asdict(self.plan)))
        del plan["streams"]  # another machine goes on with as many as it has
        changed = sorted(key for key in plan if plan[key] != state["plan"].get(key))
        if state["data"] != self.data.sha256():
            changed.append("data")
        if changed:
            raise RequestError(
                f"{path} belongs to a training with other {', '.join(changed)}: give another"
                " directory, or remove it"
            )
        groups: dict[str, list[tuple[str, mx.array]]] = {"head": [], "optimiser": []}
        for name, array in arrays.items():
            group, _, rest = name.partition(".")
            groups[group].append((rest, array))
        self.head.load_weights(groups["head"], strict=True)
        self._optimiser.state = tree_unflatten(groups["optimiser"])
        self.step, self.log = state["step"], state["log"]
        self._sums, self.seconds = np.array(state["sums"]), state["seconds"]
        mx.eval(self.head.parameters(), self._optimiser.state)
