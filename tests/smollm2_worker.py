"""Runs in a process of its own: the default model with one BLAS, with drafts and without.

    python smollm2_worker.py BLAS MODEL [long]

Prints one JSON object. Nothing that imports MLX may come before the BLAS is chosen.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import mtplx

BLAS = sys.argv[1] if __name__ == "__main__" else "auto"
mtplx.use_blas(BLAS)  # type: ignore[arg-type]

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from doubles import (  # noqa: E402
    KnowingDrafter,
    new_sequence,
    race_margin,
    randomise,
    row_logits,
    run,
)

from mtplx import heldout  # noqa: E402
from mtplx.api import start  # noqa: E402
from mtplx.drafters import MTPDrafter, NgramDrafter  # noqa: E402
from mtplx.families import family_of  # noqa: E402
from mtplx.mtp_patch import attach_head, new_head  # noqa: E402
from mtplx.sampler_config import SamplerConfig  # noqa: E402
from mtplx.state import State  # noqa: E402

PROMPTS = (
    "red green blue, red green blue, red",
    "The capital of France is",
    "def add(a, b):",
    "1 2 3 1 2 3 1",
)
# (prompt, temperature, seed). The reference BLAS takes a tenth of a second a row: fewer there.
CASES = ((0, 0.0, 1), (3, 0.6, 4), (2, 1.0, 3), (1, 0.6, 2), (1, 0.0, 5))
SLOW_CASES, SLOW_TOKENS, TOKENS = 3, 16, 24
# A random head's drafts are all refused: each of its rounds costs a whole block for one token.
MTP_SHARE = 2
# The long comparison: so many held-out prompts, their first ids only, each at every temperature.
LONG_PROMPTS, LONG_IDS = 20, 10
TEMPERATURES = (0.0, 0.6, 1.0)
TOGETHER = ("auto", "mtp", "ngram", "auto", "mtp", "ngram", "auto", "mtp", "none")


class MostlyRight(KnowingDrafter):
    """Knows the output but errs at every fourth token: blocks are kept to every length."""

    def propose(self, depth: int, proposal: Any) -> Any:
        known = self.known
        self.known = [(t + (i % 4 == 3)) % proposal.vocab_size for i, t in enumerate(known)]
        try:
            return super().propose(depth, proposal)
        finally:
            self.known = known


def compare(bundle: Any, head: Any) -> list[dict[str, Any]]:
    """Every case with every drafter against plain decoding; a difference comes with its margin."""
    out = []
    slow = BLAS == "reference"
    depth, tokens = 0, SLOW_TOKENS if slow else TOKENS
    for prompt, temperature, seed in CASES[: SLOW_CASES if slow else None]:
        ids = bundle.tokenizer.encode(PROMPTS[prompt])
        common = {
            "config": SamplerConfig(temperature=temperature),
            "seed": seed,
            "eos_ids": sorted(bundle.tokenizer.eos_ids),
        }
        plain = run(new_sequence(bundle.trunk, ids, max_tokens=tokens, **common))
        drafters = (
            NgramDrafter(shortest=1),
            MTPDrafter(attach_head(bundle.trunk, head)),
            MostlyRight(len(ids), plain.tokens[len(ids) :]),
        )
        for drafter in drafters:
            depth = depth % 5 + 1
            limit = tokens // MTP_SHARE if drafter.name == "mtp" else tokens
            other = new_sequence(
                bundle.trunk, ids, drafter, depth=depth, max_tokens=limit, **common
            )
            same = run(other).tokens == plain.tokens[: len(ids) + limit]
            case = {
                "prompt": prompt,
                "temperature": temperature,
                "drafter": drafter.name,
                "depth": depth,
                "tokens": len(other.token_ids),
                "same": same,
                "accepted": sum(other.stats.accepted),
                "margin": None if same else margin(plain, other),
            }
            out.append(case)
    return out


def compare_long(bundle: Any) -> dict[str, Any]:
    """Drafted and plain decoding on held-out prompts: tokens, and the verify logits by their bits.

    Drafters and depths rotate, so that each of them meets every temperature.
    """
    prompts = [
        bundle.tokenizer.encode(text)[:LONG_IDS]
        for text in heldout.chosen("mt-bench", LONG_PROMPTS)
    ]
    cases: list[dict[str, Any]] = []
    for number, (ids, temperature) in enumerate(itertools.product(prompts, TEMPERATURES)):
        common = {
            "config": SamplerConfig(temperature=temperature, top_p=1.0, top_k=0),
            "seed": number,
            "max_tokens": TOKENS,
        }
        plain, rows = recorded(new_sequence(bundle.trunk, ids, **common))
        drafter = (
            NgramDrafter(shortest=1),
            MTPDrafter(bundle.attached),
            MostlyRight(len(ids), plain.tokens[len(ids) :]),
        )[(number + number // len(TEMPERATURES)) % 3]
        family = bundle.attached.family if drafter.needs_hidden else bundle.trunk
        depth = number % 5 + 1
        other, checked = recorded(new_sequence(family, ids, drafter, depth=depth, **common))
        expected = dict(rows)
        # A row is plain decoding's as long as all tokens up to it are.
        shared = [pair for pair in checked if pair[0] in expected]
        cases.append(
            {
                "temperature": temperature,
                "drafter": drafter.name,
                "depth": depth,
                "tokens": len(other.token_ids),
                "same": other.tokens == plain.tokens,
                "accepted": sum(other.stats.accepted),
                "rows": len(shared),
                "equal": sum(logits == expected[prefix] for prefix, logits in shared),
            }
        )
    return {"blas": mtplx.blas.status().name, "cases": cases}  # type: ignore[attr-defined]


def recorded(sequence: Any) -> tuple[Any, list[tuple[tuple[int, ...], bytes]]]:
    """The sequence, run, and every row that it saw: all tokens so far, and the logits' bits."""
    rows: list[tuple[tuple[int, ...], bytes]] = []
    forward = sequence.state.forward

    def listen(tokens: Sequence[int]) -> Any:
        outputs = forward(tokens)
        before = sequence.tokens[:-1]
        for i, row in enumerate(np.asarray(outputs[1])):
            rows.append(((*before, *tokens[: i + 1]), row.tobytes()))
        return outputs

    sequence.state.forward = listen
    run(sequence)
    del sequence.state.forward  # a cycle would keep the rows in memory
    return sequence, rows


def compare_together(model: str) -> list[dict[str, Any]]:
    """Nine requests of all kinds, each alone, then all of them a round each in turn."""
    bundle = mtplx.load(model)

    def fresh() -> list[Any]:
        streams = []
        for i, draft in enumerate(TOGETHER):
            temperature, penalty = TEMPERATURES[(i + i // 3) % 3], 1.2 if i % 4 == 3 else 1.0
            sampling = SamplerConfig(temperature=temperature, repetition_penalty=penalty)
            options = mtplx.Options(
                sampling=sampling, max_tokens=TOKENS + i, seed=i // 2, draft=draft,
                depth="auto" if draft == "auto" else 2 + i // 2,
                verify=("block", "coupled", "token")[(2 * i + i // 3) % 3], chat=draft != "ngram",
            )  # fmt: skip
            prompt = PROMPTS[(3 * i + 1) % len(PROMPTS)]
            streams.append(start(bundle, prompt * (20 if i == 4 else 1), options))
        return streams

    alone = [stream.result() for stream in fresh()]
    streams = fresh()
    turns = [iter(stream) for stream in streams]
    while turns:
        turns = [turn for turn in turns if next(turn, None) is not None]
    together = [stream.result() for stream in streams]
    return [
        {
            "draft": draft,
            "same": (a.token_ids, a.text, a.stats.rounds) == (b.token_ids, b.text, b.stats.rounds),
            "tokens": len(a.token_ids),
            "rounds": a.stats.rounds,
            "text": a.text,
        }
        for draft, a, b in zip(TOGETHER, alone, together, strict=True)
    ]


def margin(plain: Any, other: Any) -> float:
    """How close the first difference was (see ``doubles.race_margin``)."""
    pairs = zip(plain.tokens, other.tokens, strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    logits = row_logits(plain, plain.tokens[:at])
    return race_margin(plain, logits, at, plain.tokens[at], other.tokens[at])


def forward(state: State, tokens: Sequence[int]) -> np.ndarray:
    _, logits = state.forward(tokens)
    return np.asarray(logits, dtype=np.float64)


def row_differences(bundle: Any, ids: Sequence[int]) -> list[float]:
    """|verify-forward logits - AR logits| at one position, for each number of drafts 1..5."""
    family = family_of(bundle.trunk)
    text = bundle.tokenizer.encode(" and then we walked home")[:6]
    state = State(family)
    for _ in state.prefill(ids):
        pass
    mark = state.mark(6)
    single = np.concatenate([forward(state, [token]) for token in text])
    out = []
    for depth in range(1, 6):
        state.restore(mark)
        rows = forward(state, text[: depth + 1])
        out.append(float(np.abs(rows - single[: depth + 1]).max()))
    return out


def rollback_differences(bundle: Any, ids: Sequence[int]) -> list[float]:
    """After a rejection at every position, the next logits against those of a fresh prefill."""
    family = family_of(bundle.trunk)
    block = bundle.tokenizer.encode(" the quick brown fox")[:3]
    probe = bundle.tokenizer.encode(" hello")[:1]
    state = State(family)
    for _ in state.prefill(ids):
        pass
    out = []
    for keep in range(len(block) + 1):
        mark = state.mark(len(block))
        forward(state, block)
        state.rollback(mark, block[:keep])
        fresh = State(family)
        for _ in fresh.prefill([*ids, *block[:keep]]):
            pass
        assert [c.offset for c in state.caches] == [c.offset for c in fresh.caches]
        assert state.length == fresh.length == len(ids) + keep
        after = state.mark(1)
        out.append(float(np.abs(forward(state, probe) - forward(fresh, probe)).max()))
        state.restore(after)
        state.rollback(mark, [])
    return out


def main() -> None:
    bundle = mtplx.load(sys.argv[2], weights="float32")
    if sys.argv[3:] == ["long"]:
        print(json.dumps(compare_long(bundle)))
        return
    head = new_head(bundle.trunk)
    randomise(head, 2)
    mx.eval(head.parameters())
    ids = bundle.tokenizer.encode(PROMPTS[1])
    report = {
        "blas": mtplx.blas.status().name,  # type: ignore[attr-defined]
        "rows": row_differences(bundle, ids),
        "rollback": rollback_differences(bundle, ids),
        "cases": compare(bundle, head),
        "together": [] if BLAS == "reference" else compare_together(sys.argv[2]),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
