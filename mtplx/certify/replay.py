"""Seed replay, and how far verify forwards are from those of plain decoding.

Replay: under one seed the coupled rule emits the text of plain decoding, so both are run and
compared. Drift: the text that an engine has emitted is run again, one row a forward, and the logits
are compared with those it was verified by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..agreement import difference
from ..api import encode_prompt, start
from ..engine import Round
from ..families import family_of
from ..load import Bundle
from ..options import Options
from ..sampler_config import SamplerConfig
from ..state import State

TEMPERATURES = (0.0, 0.6, 1.0)
DEPTHS = (1, 2, 3, 4, 5)
TOKENS = 24


@dataclass
class Replay:
    """Pairs of outputs under one seed.

    runs: pairs.  identical: equal in every token.  near_ties: a first difference that another
    order of summation explains.  unexplained: a first difference at the threshold of a filter,
    whose margin is unknown.  different: any other.  notes: a line for each first difference.
    """

    runs: int = 0
    identical: int = 0
    near_ties: int = 0
    unexplained: int = 0
    different: int = 0
    notes: list[str] = field(default_factory=list)


def cases(prompts: Sequence[str]) -> list[tuple[str, float, int]]:
    """(prompt, temperature, depth) of every pair; the depths rotate."""
    pairs = [(prompt, t) for prompt in prompts for t in TEMPERATURES]
    return [(*pair, DEPTHS[i % len(DEPTHS)]) for i, pair in enumerate(pairs)]


def run(
    bundle: Bundle, prompts: Sequence[str], *, first_seed: int, before: Callable[[], bool]
) -> Replay:
    """Every prompt at every temperature, until ``before`` says to stop."""
    found = Replay()
    for seed, (prompt, temperature, depth) in enumerate(cases(prompts), first_seed):
        if not before():
            break
        sampling = SamplerConfig(temperature=temperature)
        drafted, plain = (
            start(bundle, prompt, Options(sampling, TOKENS, seed=seed, verify="coupled", **how))
            .result()
            .token_ids
            for how in ({"depth": depth}, {"draft": "none"})
        )
        ids = encode_prompt(bundle, prompt)
        first = difference(bundle, ids, drafted, plain, sampling=sampling, seed=seed)
        found.runs += 1
        if first is None:
            found.identical += 1
            continue
        found.notes.append(f"seed {seed}, T = {temperature:g}, depth {depth}: {first}")
        if first.near_tie:
            found.near_ties += 1
        elif first.margin is None and None not in first.tokens:
            found.unexplained += 1
        else:
            found.different += 1
    return found


class Recorder:
    """The logits by which the tokens of one output were verified: an ``on_round``."""

    def __init__(self, prompt: Sequence[int]):
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.rows: list[np.ndarray] = []

    def watch(self, done: Round) -> None:
        """Keep the rows of what a round emitted."""
        self.rows += list(_host(done.logits[: len(done.emitted)]))
        self.tokens += done.emitted


@dataclass
class Drift:
    """Differences of logits between verify forwards and plain decoding's, a number a position."""

    largest: list[float] = field(default_factory=list)
    flips: int = 0

    def add(self, bundle: Bundle, record: Recorder) -> None:
        """Run an output again, one row a forward, and compare."""
        state = State(family_of(bundle.trunk))
        for _ in state.prefill(record.tokens[: record.prompt_length - 1]):
            pass
        inputs = record.tokens[record.prompt_length - 1 : -1]
        for token, row in zip(inputs, record.rows, strict=True):
            plain = _host(state.forward([token])[1])[0]
            self.largest.append(float(np.abs(plain - row).max()))
            self.flips += int(plain.argmax() != row.argmax())

    def to_dict(self) -> dict[str, Any]:
        """Positions, how many are equal in every logit, quantiles and the largest difference."""
        gaps = np.array(self.largest)
        quantiles = {
            f"{q:g}": float(np.quantile(gaps, q)) if gaps.size else None for q in (0.5, 0.9, 0.99)
        }
        return {
            "positions": gaps.size,
            "equal": int((gaps == 0).sum()),
            "max": float(gaps.max()) if gaps.size else None,
            "quantiles": quantiles,
            "argmax_flips": self.flips,
        }


def _host(logits: mx.array) -> np.ndarray:
    return np.array(logits.astype(mx.float32))
