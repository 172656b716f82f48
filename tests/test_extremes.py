"""Extreme parameters and laws on the engine, under every rule, and sequences side by side."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from doubles import (
    GREEDY,
    PLAIN,
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    Remembering,
    hashed_logits,
    new_sequence,
    run,
    tiny_llama,
)
from test_constraints import Alternating

from mtplx.drafters import Draft, NgramDrafter
from mtplx.engine import Engine
from mtplx.errors import NonFiniteLogitsError
from mtplx.sampler_config import SamplerConfig
from mtplx.verify import RULES

VOCAB, PROMPT = 16, [5, 6, 5]
LOGITS = hashed_logits(VOCAB)


class LawDrafter(Remembering):
    """Draws from the trunk's own law, changed by ``change``: with none, q = p."""

    name = "law"

    def __init__(self, change=lambda row: row):
        super().__init__()
        self.change = change

    def propose(self, depth, proposal):
        tokens, q_rows = [], []
        for i in range(depth):
            row = self.change(LOGITS((*self.tokens, *tokens)))
            q_rows.append(proposal.law(mx.array(row.astype(np.float32)), tokens, None))
            tokens.append(proposal.draw(i, q_rows[-1]))
        return Draft(tokens, q_rows)


def sequence_of(config, rule, drafter=None, depth=0, seed=3, **how):
    family = ExactFamily(LOGITS, VOCAB)
    how = {"max_tokens": 24, **how}
    return new_sequence(
        family, PROMPT, drafter, rule=rule, depth=depth, seed=seed, config=config, **how
    )


CERTAIN = {
    "T = 1e-38": SamplerConfig(temperature=1e-38, top_p=1.0, top_k=0),
    "T = 1e-38, top-p": SamplerConfig(temperature=1e-38, top_p=0.5, top_k=0),
    "T = 1e-308": SamplerConfig(temperature=1e-308, top_p=0.9, top_k=5, min_p=0.1),
    "T = -1": SamplerConfig(temperature=-1.0),
    "top_p = 1e-9": SamplerConfig(temperature=1.0, top_p=1e-9, top_k=0),
    "top_k = 1": SamplerConfig(temperature=5.0, top_p=1.0, top_k=1),
    "min_p = 1": SamplerConfig(temperature=5.0, top_p=1.0, top_k=0, min_p=1.0),
}


@pytest.mark.parametrize("config", CERTAIN.values(), ids=CERTAIN)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_where_the_law_is_one_token_the_output_is_greedy(rule, config):
    expected = run(sequence_of(GREEDY, "coupled")).token_ids
    for drafter in (None, RandomDrafter(1), LawDrafter(), KnowingDrafter(3, expected, shift=1)):
        sequence = run(sequence_of(config, rule, drafter, 4 if drafter else 0))
        assert sequence.token_ids == expected
        if isinstance(drafter, LawDrafter):
            assert sequence.stats.acceptance_by_position == [1.0] * 4


@pytest.mark.parametrize("rule", sorted(RULES))
def test_neutral_filters_change_nothing(rule):
    for top_k in (VOCAB, VOCAB + 1, 10**9):
        config = SamplerConfig(temperature=1.0, top_p=1.0, top_k=top_k)
        one = run(sequence_of(config, rule, RandomDrafter(1), 3))
        other = run(sequence_of(PLAIN, rule, RandomDrafter(1), 3))
        assert one.tokens == other.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e30])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_one_allowed_token_is_the_output(rule, temperature):
    ban = [t for t in range(VOCAB) if t != 7]
    config = SamplerConfig(temperature=temperature, banned_ids=ban, presence_penalty=2.0)
    for drafter in (RandomDrafter(1), KnowingDrafter(3, [7] * 30), KnowingDrafter(3, [8] * 30)):
        assert run(sequence_of(config, rule, drafter, 3)).token_ids == [7] * 24


@pytest.mark.parametrize("rule", sorted(RULES))
def test_with_q_equal_to_p_every_draft_is_kept(rule):
    for seed in range(4):
        for config in (PLAIN, SamplerConfig(frequency_penalty=0.5, repetition_penalty=1.3)):
            sequence = run(sequence_of(config, rule, LawDrafter(), 5, seed))
            assert sequence.stats.acceptance_by_position == [1.0] * 5
            assert sequence.stats.rounds == 4


@pytest.mark.parametrize("rule", sorted(RULES))
def test_with_disjoint_supports_no_draft_is_kept(rule):
    """Drafts come from the lower half of the tokens, p gives only the upper half."""

    def lower(row):
        row[VOCAB // 2 :] = -np.inf
        return row

    config = SamplerConfig(temperature=1.0, logit_bias=dict.fromkeys(range(8, 16), 200.0))
    drafter = LawDrafter(lower)
    sequence = run(sequence_of(config, rule, drafter, 4))
    assert sum(sequence.stats.accepted) == 0
    assert sequence.stats.rounds == 24
    assert all(token >= 8 for token in sequence.token_ids)


# --- side by side -------------------------------------------------------------------------------


def requests():
    """Nine requests: every rule, sampled and greedy, constrained, with drafts of several kinds."""
    trunk = tiny_llama(1)
    kinds = [
        lambda: RandomDrafter(1), lambda: NgramDrafter(shortest=1), lambda: None,
    ]  # fmt: skip
    out = []
    for i in range(9):
        config = (PLAIN, GREEDY, SamplerConfig(0.7, 0.9, 30, 0.5, 0.0, 0.05, 1.2))[i // 3]
        drafter = kinds[(i + i // 3) % 3]()
        out.append(
            new_sequence(
                trunk, [9, 4, i + 3, 9, 4], drafter, rule=sorted(RULES)[i % 3], seed=i,
                depth=(i % 4 + 2) if drafter else 0, config=config, max_tokens=12 + i,
                eos_ids=[2], min_tokens=i % 3 * 4, top_logprobs=1,
                grammar=Alternating(64, once=9) if i % 2 else None,
            )
        )  # fmt: skip
    return out


def test_a_request_alone_and_among_others_is_the_same():
    alone = [run(sequence) for sequence in requests()]
    engine, together = Engine(64), requests()
    while any(sequence.finish_reason is None for sequence in together):
        for sequence in together:  # one step() each, in turn
            engine.step([sequence])
    listed = requests()
    while any(sequence.finish_reason is None for sequence in listed):
        engine.step(listed[::-1])
    for one, *others in zip(alone, together, listed, strict=True):
        for other in others:
            assert other.tokens == one.tokens
            assert other.finish_reason == one.finish_reason
            assert other.logprobs == one.logprobs
            assert other.stats.accepted == one.stats.accepted


def test_an_error_of_one_does_not_stop_the_others():
    broken = hashed_logits(VOCAB)

    def nan(prefix):
        row = broken(prefix)
        if len(prefix) == 5:
            row[3] = np.nan
        return row

    bad = new_sequence(ExactFamily(nan, VOCAB), PROMPT, seed=1)
    good = [sequence_of(PLAIN, "block", RandomDrafter(i), 2, i, max_tokens=9) for i in range(2)]
    engine, failures = Engine(VOCAB), 0
    while any(sequence.finish_reason is None for sequence in good):
        raised = None
        try:
            engine.step([good[0], bad, good[1]])
        except NonFiniteLogitsError as e:
            raised, failures = e, failures + 1
        assert bad.error is raised
    assert failures > 1
    assert bad.finish_reason is None
    assert len(bad.tokens) == 5
    for i, sequence in enumerate(good):
        assert sequence.error is None
        alone = run(sequence_of(PLAIN, "block", RandomDrafter(i), 2, i, max_tokens=9))
        assert sequence.tokens == alone.tokens
