"""The round: same output with every drafter, the exact law, stops, interruptions, counters."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from doubles import (
    GREEDY,
    PLAIN,
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    hashed_logits,
    new_sequence,
    randomise,
    row_logits,
    run,
    same_or_near_tie,
    tiny_llama,
)
from scipy_free import chi_square_p

from mtplx.distribution import SparseDistribution
from mtplx.drafters import MTPDrafter, NgramDrafter
from mtplx.engine import Engine
from mtplx.fast_sampling import sparse_distributions_from_mlx_logits
from mtplx.mtp_patch import attach_head, new_head
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits

PROMPT = [9, 4, 31, 9, 4]
RULES = ("token", "block", "coupled")
TEMPERATURES = (0.0, 0.6, 1.0)
DEPTHS = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def trunk():
    return tiny_llama(1)


@pytest.fixture(scope="module")
def head(trunk):
    head = new_head(trunk)
    randomise(head, 2)
    return head


def drafters(trunk, head, output):
    """One of every kind; ``output`` is what plain decoding emits."""
    n = len(PROMPT)
    return {
        "random": RandomDrafter(3),
        "oracle": KnowingDrafter(n, output),
        "always wrong": KnowingDrafter(n, output, shift=1),
        "ngram": NgramDrafter(longest=3, shortest=1),
        "mtp": MTPDrafter(attach_head(trunk, head)),
    }


def sampling(temperature, **more):
    return SamplerConfig(temperature=temperature, top_p=0.95, top_k=20, **more)


# --- the same output as plain decoding ----------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_coupled_output_is_plain_decodings_token_for_token(trunk, head, temperature):
    near_ties = 0
    for seed in range(5):
        config = sampling(temperature)
        plain = run(new_sequence(trunk, PROMPT, seed=seed, config=config, max_tokens=16))
        output = plain.tokens[len(PROMPT) :]
        for i, (name, drafter) in enumerate(drafters(trunk, head, output).items()):
            depth = DEPTHS[(seed + i) % 5]
            sequence = new_sequence(
                trunk, PROMPT, drafter, depth=depth, seed=seed, config=config, max_tokens=16
            )
            run(sequence)
            near_ties += same_or_near_tie(plain, sequence) is not None
            assert len(sequence.token_ids) == 16
            if name == "always wrong" and not near_ties:
                assert sum(sequence.stats.accepted) == 0
            if name == "oracle" and not near_ties:
                assert sequence.stats.rounds == -(-16 // (depth + 1))
    assert near_ties <= 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_coupled_output_on_an_exact_trunk_has_no_near_ties(depth):
    """Many seeds, a trunk whose rows do not depend on their number: equality without excuse."""
    family = ExactFamily(hashed_logits(16), 16)
    for seed in range(12):
        config = sampling((0.3, 0.6, 1.0, 1.7)[seed % 4])
        plain = run(new_sequence(family, PROMPT[:2], seed=seed, config=config, max_tokens=15))
        for drafter in (RandomDrafter(seed), NgramDrafter(shortest=1, longest=2)):
            sequence = new_sequence(
                family, PROMPT[:2], drafter, depth=depth, seed=seed, config=config, max_tokens=15
            )
            assert run(sequence).tokens == plain.tokens


@pytest.mark.parametrize("rule", RULES)
def test_greedy_output_is_plain_decodings_under_every_rule(trunk, head, rule):
    plain = run(new_sequence(trunk, PROMPT, config=GREEDY, max_tokens=20))
    output = plain.tokens[len(PROMPT) :]
    for depth in DEPTHS:
        for drafter in drafters(trunk, head, output).values():
            sequence = new_sequence(
                trunk, PROMPT, drafter, rule=rule, depth=depth, config=GREEDY, max_tokens=20
            )
            run(sequence)
            assert same_or_near_tie(plain, sequence) is None


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.2},
        {"repetition_penalty": 1.6},
        {"presence_penalty": -0.7, "frequency_penalty": 0.4, "repetition_penalty": 0.8,
         "logit_bias": {3: 2.0, 5: -4.0}, "min_p": 0.02},
    ],
)  # fmt: skip
def test_penalties_count_the_drafts_of_the_block(penalties):
    """A trunk that wants to repeat: without the drafts before it in the history, each row lies."""
    logits = hashed_logits(12, order=1, scale=2.5)
    family = ExactFamily(logits, 12)
    changed = 0
    for seed in range(9):
        config = sampling((0.0, 0.7, 1.2)[seed % 3], **penalties)
        plain = run(new_sequence(family, [1, 2, 1], seed=seed, config=config, max_tokens=14))
        output = plain.tokens[3:]
        for depth in (2, 5):
            for drafter in (KnowingDrafter(3, output), RandomDrafter(1), NgramDrafter(shortest=1)):
                sequence = new_sequence(
                    family, [1, 2, 1], drafter, depth=depth, seed=seed, config=config, max_tokens=14
                )
                assert run(sequence).tokens == plain.tokens
        neutral = sampling(config.temperature)
        other = run(new_sequence(family, [1, 2, 1], seed=seed, config=neutral, max_tokens=14))
        changed += other.tokens != plain.tokens
    assert changed > 3, "the penalties must matter for this test to mean anything"


def test_the_law_of_a_row_does_not_depend_on_the_rows_beside_it(trunk):
    """What coupled equality rests on, below the trunk: one function, one row or many, same bits."""
    rows = mx.array(np.random.default_rng(0).standard_normal((6, 5000)) * 4, mx.float32)
    counts = [Counter({i: 1, 7: i}) for i in range(6)]
    for config in (
        GREEDY,
        PLAIN,
        SamplerConfig(),
        SamplerConfig(temperature=0.9, top_p=0.8, top_k=0, min_p=0.01),
        SamplerConfig(presence_penalty=1.0, frequency_penalty=0.3, repetition_penalty=1.2),
    ):
        together = sparse_distributions_from_mlx_logits(
            rows, config, token_counts=counts, prompt_ids=[1, 2]
        )
        for i, law in enumerate(together):
            (alone,) = sparse_distributions_from_mlx_logits(
                rows[i : i + 1], config, token_counts=counts[i : i + 1], prompt_ids=[1, 2]
            )
            assert alone == law


# --- the law of the outputs -----------------------------------------------------------------------


@pytest.fixture
def host_law(monkeypatch):
    """The reference law in place of its device twin, whose parity is tested elsewhere: faster."""

    def laws(logits, config, *, token_counts=None, prompt_ids=None):
        rows = np.asarray(logits, dtype=np.float64)
        counts = [None] * len(rows) if token_counts is None else token_counts
        out = []
        for row, count in zip(rows, counts, strict=True):
            p = distribution_from_logits(row, config, token_counts=count, prompt_ids=prompt_ids)
            out.append(SparseDistribution(np.flatnonzero(p), p[p > 0], p.size))
        return out

    monkeypatch.setattr("mtplx.sequence.sparse_distributions_from_mlx_logits", laws)


def exact_law(logits, config, prompt, length, eos=()):
    """{output: probability} of plain decoding, by multiplying out the reference law."""
    laws = {(): 1.0}
    for _ in range(length):
        following: dict[tuple[int, ...], float] = {}
        for output, chance in laws.items():
            if output and output[-1] in eos:
                following[output] = following.get(output, 0.0) + chance
                continue
            p = distribution_from_logits(
                logits((*prompt, *output)), config, token_counts=Counter(output), prompt_ids=prompt
            )
            for token in np.flatnonzero(p):
                following[(*output, int(token))] = chance * float(p[token])
        laws = following
    return laws


def assert_follows(samples, law):
    assert set(samples) <= set(law), "an output outside the support"
    p_value = chi_square_p(samples, law)
    assert p_value > 1e-3, f"chi-square p-value {p_value:.2e}"


CONFIGS = {
    "plain": PLAIN,
    "filtered": SamplerConfig(temperature=0.8, top_p=0.9, top_k=5),
    "penalised": SamplerConfig(
        temperature=1.1, top_p=1.0, top_k=0, presence_penalty=1.0, repetition_penalty=1.3
    ),
}


@pytest.mark.parametrize(
    ("rule", "name"),
    [*(("token", name) for name in CONFIGS), ("coupled", "filtered"), ("block", "penalised")],
)
def test_the_outputs_law_is_exact(rule, name, host_law):
    """Joint law of three tokens (V = 8) over fixed seeds, with drafts that have another law."""
    config, logits, prompt = CONFIGS[name], hashed_logits(8, seed=5), (3,)
    family = ExactFamily(logits, 8)
    samples = Counter()
    for seed in range(1000):
        drafter = RandomDrafter(2) if seed % 2 else NgramDrafter(shortest=1, longest=2)
        sequence = new_sequence(
            family, prompt, drafter, rule=rule, depth=3, seed=seed, config=config, max_tokens=3
        )
        engine = Engine(8)
        while sequence.finish_reason is None:
            engine.step([sequence])
        samples[tuple(sequence.token_ids)] += 1
    assert_follows(samples, exact_law(logits, config, prompt, 3))


def test_the_law_with_an_end_of_sequence_inside_blocks(host_law):
    logits, prompt = hashed_logits(6, seed=8), (3,)
    family = ExactFamily(logits, 6)
    samples = Counter()
    for seed in range(1000):
        sequence = new_sequence(
            family, prompt, RandomDrafter(4), rule="token", depth=3, seed=seed, max_tokens=4,
            eos_ids=[2],
        )  # fmt: skip
        engine = Engine(6)
        while sequence.finish_reason is None:
            engine.step([sequence])
        samples[tuple(sequence.token_ids)] += 1
    assert_follows(samples, exact_law(logits, PLAIN, prompt, 4, eos=(2,)))


def test_the_law_on_a_llama_with_an_mtp_head():
    """V = 10: drafts drawn from a random head, judged on real logits; two tokens and their law."""
    trunk = tiny_llama(
        4, vocab_size=10, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, num_hidden_layers=1,
    )  # fmt: skip
    head = new_head(trunk)
    randomise(head, 6)
    config = SamplerConfig(temperature=1.0, top_p=0.97, top_k=0)
    probe = new_sequence(trunk, [1, 5])
    known = {}

    def logits(prefix):
        if prefix not in known:
            known[prefix] = row_logits(probe, prefix)
        return known[prefix]

    samples = Counter()
    accepted = 0
    for seed in range(300):
        sequence = new_sequence(
            trunk, [1, 5], MTPDrafter(attach_head(trunk, head)), rule="token", depth=2, seed=seed,
            config=config, max_tokens=3,
        )  # fmt: skip
        engine = Engine(10)
        while sequence.finish_reason is None:
            engine.step([sequence])
        samples[tuple(sequence.token_ids[:2])] += 1
        accepted += sum(sequence.stats.accepted)
    assert accepted > 40
    assert_follows(samples, exact_law(logits, config, (1, 5), 2))
