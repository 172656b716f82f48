"""Named checks: each passes on the shipped code, and says false, or raises, on some fault."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from doubles import (
    GREEDY,
    PLAIN,
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    Spelling,
    hashed_logits,
    new_sequence,
    randomise,
    scripted_logits,
)
from tiny import write_directory

import mtplx
from mtplx.certify import replay
from mtplx.certify.cases import BLOCKS
from mtplx.certify.engine_play import REQUESTS, Request, request_distance
from mtplx.certify.engine_play import new_sequence as new_request
from mtplx.certify.enumeration import EXACT, total_variation
from mtplx.certify.eprocess import EProcess
from mtplx.engine import Engine
from mtplx.errors import NonFiniteLogitsError
from mtplx.mtp_patch import new_head
from mtplx.rng import Draws
from mtplx.sampling import accepts
from mtplx.verify import RULES


def passes(check: str) -> bool:
    """Whether a check passes; one that raises does not."""
    kind, _, rest = check.partition(" ")
    rule, _, case = rest.partition(" ")
    try:
        if kind == "law":
            return total_variation(rule, BLOCKS[case]) <= EXACT
        if kind == "engine":
            return request_distance(rule, REQUESTS[case]) <= EXACT
        if kind == "bets":
            return bets(rule).decision == "certified"
        return OWN[check]()
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False


def is_of_the_certificate(check: str) -> bool:
    return check.split()[0] in ("law", "engine", "replay", "bets")


def outputs(draft: bool, config=PLAIN, **how):
    """Outputs of an exact trunk under several seeds, with a random drafter or none."""
    for seed in range(12):
        family = ExactFamily(hashed_logits(12, seed=seed), 12)
        drafter = RandomDrafter(seed) if draft else None
        depth = 3 if draft else 0
        sequence = new_sequence(
            family, [3, 4], drafter, depth=depth, seed=seed, config=config, **how
        )
        run(sequence)
        yield sequence


def run(sequence) -> None:
    while sequence.finish_reason is None:
        Engine(12).step([sequence])


def bets(rule: str, delta: float = 0.2) -> EProcess:
    """The certificate's sequential test on a trunk of three tokens."""
    process = EProcess(alpha=1e-3, delta=delta)
    case = Request(max_tokens=40, depth=3)
    engine = Engine(case.vocab, on_round=process.watch)
    for seed in range(60):
        sequence = new_request(rule, replace(case, seed=seed))
        sequence.draws = Draws(seed)
        while sequence.finish_reason is None:
            engine.step([sequence])
        if process.decision is not None:
            break
    return process


# --- checks of their own ------------------------------------------------------------------------


FOLDER = tempfile.TemporaryDirectory()


@cache
def tiny_bundle():
    """A random llama with a random head; laws so flat that drafts are kept by chance."""
    path = write_directory(Path(FOLDER.name), max_position_embeddings=64)
    bundle = mtplx.load(path, weights="float32")
    embedding = bundle.trunk.model.embed_tokens
    embedding.weight = 0.1 * embedding.weight
    head = new_head(bundle.trunk)
    randomise(head, 1)
    return replace(bundle, head=head)


def replayed() -> bool:
    found = replay.run(tiny_bundle(), ["the", "a"], first_seed=0, before=lambda: True)
    return found.runs == 6 and not found.different


def strict() -> bool:
    return not accepts(0.0, 0.0, 0.5)


def exact_length() -> bool:
    return all(
        len(s.token_ids) == n and len(s.tokens) == 2 + n
        for n in (1, 2, 5, 6)
        for rule in RULES
        for s in outputs(True, rule=rule, max_tokens=n)
    )


def cut_together() -> bool:
    family = ExactFamily(scripted_logits([1, 2, 3, 4, 5], 1, 6), 6)
    spelling = Spelling(["", "a", "bc", "d", "e", "f"])
    sequence = new_sequence(
        family, [0], KnowingDrafter(1, [1, 2, 3, 4, 5]), depth=3, config=GREEDY, stops=["cd"],
        detokenizer=spelling,
    )  # fmt: skip
    run(sequence)
    return sequence.token_ids == [1, 2]


def same_logprobs() -> bool:
    pairs = zip(
        outputs(True, rule="coupled", top_logprobs=0), outputs(False, top_logprobs=0), strict=True
    )
    return all(
        np.allclose(*([each.logprob for each in s.logprobs] for s in pair), rtol=0, atol=1e-9)
        for pair in pairs
    )


def nan_is_refused() -> bool:
    for config in (PLAIN, GREEDY):
        sequence = new_sequence(ExactFamily(lambda _: np.full(5, np.nan), 5), [1], config=config)
        try:
            run(sequence)
        except NonFiniteLogitsError:
            continue
        return False
    return True


OWN = {
    "replay": replayed,
    "a draft of p = 0 is refused at u = 0": strict,
    "an output ends at max_tokens": exact_length,
    "ids end where the text does": cut_together,
    "logprobs are plain decoding's": same_logprobs,
    "a row of NaN is an error": nan_is_refused,
}
