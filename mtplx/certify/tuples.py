"""Chi-square on tuples: the first tokens of one prompt under many seeds, against plain decoding.

The expected law is computed by forwards over one row each, along every possible beginning, so this
check is independent of what the engine recorded. Cells that expect too little are merged into one.
The p-value is by simulation from the expected law, so it is exact however few cells there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..api import encode_prompt, start
from ..distribution import support
from ..families import family_of
from ..load import Bundle
from ..options import Options, RuleName
from ..sampler_config import SamplerConfig
from ..sequence import History
from ..state import State

Tokens = tuple[int, ...]

# Three tokens, three choices each: at most 27 cells.
SAMPLING = SamplerConfig(temperature=1.0, top_p=1.0, top_k=3)
LENGTH, DEPTH = 3, 2
_FEWEST = 5.0
_SIMULATIONS = 20_000


@dataclass(frozen=True)
class ChiSquare:
    """The statistic of ``runs`` tuples in merged ``bins``, and how likely a larger one is."""

    runs: int
    bins: int
    statistic: float
    p_value: float


def chi_square(counts: Mapping[Tokens, int], law: Mapping[Tokens, float]) -> ChiSquare:
    """Compare counts of tuples with their law. A tuple that the law does not have: p-value 0.

    A p-value is at least 1 / 20,001, since it comes from 20,000 simulations, of a fixed seed.
    """
    runs = sum(counts.values())
    cells = sorted(law, key=lambda cell: (-law[cell], cell))
    wide = [cell for cell in cells if law[cell] * runs >= _FEWEST]
    rest = sum(law[cell] for cell in cells[len(wide) :])
    expected = np.array([law[cell] for cell in wide] + [rest] * (rest > 0))
    seen = [counts.get(cell, 0) for cell in wide]
    if any(cell not in law for cell in counts) or not runs:
        return ChiSquare(runs, len(expected), np.inf if runs else 0.0, 0.0 if runs else 1.0)
    observed = np.array(seen + [runs - sum(seen)] * (rest > 0))
    expected = expected / expected.sum()

    def statistic(table: np.ndarray) -> np.ndarray:
        return ((table - runs * expected) ** 2 / (runs * expected)).sum(axis=-1)

    found = float(statistic(observed))
    simulated = statistic(np.random.default_rng(1).multinomial(runs, expected, _SIMULATIONS))
    larger = int((simulated >= found * (1 - 1e-12)).sum())
    return ChiSquare(runs, len(expected), found, (1 + larger) / (1 + _SIMULATIONS))


def law_of_tuples(bundle: Bundle, prompt: Sequence[int]) -> dict[Tokens, float]:
    """The law of the first ``LENGTH`` tokens after ``prompt``, by forwards over one row."""
    law: dict[Tokens, float] = {}
    state = State(family_of(bundle.trunk))
    for _ in state.prefill(prompt[:-1]):
        pass
    waiting: list[tuple[Tokens, float]] = [((), 1.0)]
    while waiting:
        begun, weight = waiting.pop()
        if len(begun) == LENGTH or (begun and begun[-1] in bundle.tokenizer.eos_ids):
            law[begun] = weight
            continue
        mark, history = state.mark(len(begun) + 1), History(SAMPLING, prompt)
        logits = [state.forward([token])[1] for token in (prompt[-1], *begun)][-1]
        for token in begun:
            history.append(token)
        ids, probs = support(history.law_after(logits[0], []))
        state.rollback(mark, [])
        waiting += [((*begun, int(i)), weight * float(p)) for i, p in zip(ids, probs, strict=True)]
    return law


def tuples_of(
    bundle: Bundle,
    prompt: Sequence[int],
    rule: RuleName,
    runs: int,
    *,
    first_seed: int,
    before: Callable[[], bool],
) -> Counter[Tokens]:
    """Count the first tokens of up to ``runs`` outputs, until ``before`` says to stop."""
    counts: Counter[Tokens] = Counter()
    for seed in range(first_seed, first_seed + runs):
        if not before():
            break
        options = Options(SAMPLING, LENGTH, seed=seed, depth=DEPTH, verify=rule)
        counts[tuple(start(bundle, prompt, options).result().token_ids)] += 1
    return counts


def run(
    bundle: Bundle, prompt: str, rule: RuleName, runs: int, *, seed: int, before: Callable[[], bool]
) -> tuple[ChiSquare, dict[str, list[float]]]:
    """Test one rule; also the expected and the observed count of each tuple, for a plot."""
    ids = encode_prompt(bundle, prompt, chat=False)
    law = law_of_tuples(bundle, ids)
    counts = tuples_of(bundle, ids, rule, runs, first_seed=seed, before=before)
    cells = sorted(law, key=lambda cell: -law[cell])
    total = sum(counts.values())
    shown = {
        "expected": [law[cell] * total for cell in cells],
        "observed": [float(counts.get(cell, 0)) for cell in cells],
    }
    return chi_square(counts, law), shown
