"""Runs in a process of its own: how many drafts each rule keeps, on laws of the default model.

    python block_worker.py MODEL ROUNDS

Prints one JSON object, [token, block] each. The rows come from running rounds; the expected numbers
of kept drafts are computed from them, so no coin is in the comparison.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mtplx

if __name__ == "__main__":
    mtplx.use_blas("auto")

import numpy as np

from mtplx.api import start
from mtplx.rng import Draws
from mtplx.sampling import acceptance_probability, sample_from_distribution
from mtplx.verify import verify

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short letter to a friend.",
    "List five uses of a brick.",
    "What is a prime number?",
)
DEPTH, REDRAWN = 4, 100


def expected(p_rows: Any, q_rows: Any, draft: list[int]) -> tuple[float, float]:
    """E[kept drafts] of the token and of the block rule, given the drafts."""
    rows = zip(p_rows, q_rows, draft, strict=False)
    keep = [acceptance_probability(p, q, x) for p, q, x in rows]
    h = np.array(verify("block", p_rows, q_rows, draft, Draws(0), start=0).probabilities)
    # At least i are kept: all of the first i coins; or any of the coins from i on.
    return float(np.cumprod(keep).sum()), float((1 - np.cumprod((1 - h)[::-1])).sum())


def redrawn(rounds: list[Any]) -> Any:
    """The means over drafts drawn anew from each round's q rows, as if rows were of any drafts.

    For such rows, too, block keeps at least as much as token, and there are draws enough to see it.
    """
    generator = np.random.default_rng(1)
    found = [
        expected(each.p_rows, each.draft.q_rows, [sample_from_distribution(q, generator)
                                                  for q in each.draft.q_rows])
        for each in rounds for _ in range(REDRAWN)
    ]  # fmt: skip
    return np.mean(found, axis=0)


def main() -> None:
    bundle, rounds = mtplx.load(sys.argv[1]), int(sys.argv[2])
    out = {}
    for temperature in (0.6, 1.0):
        found: list[Any] = []

        def listen(each: Any, found: list[Any] = found) -> None:
            if len(each.draft.tokens) == DEPTH:
                found.append(each)

        for seed, prompt in enumerate(PROMPTS):
            options = mtplx.Options(
                sampling=mtplx.SamplerConfig(temperature=temperature), seed=seed, draft="mtp",
                depth=DEPTH, verify="token", max_tokens=rounds * 2,
            )  # fmt: skip
            for i, _ in enumerate(start(bundle, prompt, options, listen)):
                if i * len(PROMPTS) >= rounds:
                    break
        as_run = np.mean(
            [expected(r.p_rows, r.draft.q_rows, r.draft.tokens) for r in found], axis=0
        )
        out[str(temperature)] = {
            "blocks": len(found), "run": as_run.tolist(), "redrawn": redrawn(found).tolist()
        }  # fmt: skip
    print(json.dumps(out))


if __name__ == "__main__":
    main()
