"""log p of emitted tokens: the target's law, drafted or not, cut where the output is cut."""

from __future__ import annotations

from collections import Counter
from math import exp

import numpy as np
import pytest
from doubles import (
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    Spelling,
    hashed_logits,
    new_sequence,
    run,
    tiny_llama,
    vocab_of,
)
from tiny import write_directory

import mtplx
from mtplx.distribution import SparseDistribution
from mtplx.drafters import NgramDrafter
from mtplx.engine import Engine
from mtplx.logprobs import token_logprob
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits
from mtplx.verify import RULES

PROMPT = [9, 4, 31, 9, 4]
CONFIG = SamplerConfig(0.9, 0.95, 20, 0.4, 0.2, 0.01, 1.2, {3: 0.5}, banned_ids=[8])


def values(noted):
    return np.array([each.logprob for each in noted])


def test_speculative_logprobs_are_plain_decodings():
    trunk = tiny_llama(1)
    how = {"config": CONFIG, "max_tokens": 24, "top_logprobs": 4}
    for seed in range(3):
        plain = run(new_sequence(trunk, PROMPT, seed=seed, **how))
        output = plain.token_ids
        for depth, drafter in (
            (3, RandomDrafter(1)), (4, KnowingDrafter(5, output)), (5, NgramDrafter(shortest=1)),
        ):  # fmt: skip
            other = run(new_sequence(trunk, PROMPT, drafter, depth=depth, seed=seed, **how))
            assert other.token_ids == output
            np.testing.assert_allclose(
                values(other.logprobs), values(plain.logprobs), rtol=0, atol=1e-4
            )
            for a, b in zip(other.logprobs, plain.logprobs, strict=True):
                assert [t for t, _ in a.top] == [t for t, _ in b.top]
                assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_they_are_of_the_law_of_their_position(rule):
    logits = hashed_logits(32)
    drafter, seen = RandomDrafter(2), []
    sequence = new_sequence(
        ExactFamily(logits, 32), PROMPT[:2], drafter, rule=rule, depth=3, seed=5, config=CONFIG,
        max_tokens=30, top_logprobs=3,
    )  # fmt: skip
    engine = Engine(32, seen.append)
    while sequence.finish_reason is None:
        engine.step([sequence])
    assert [token for each in seen for token in each.emitted] == sequence.token_ids
    assert 0 < sum(sequence.stats.accepted) < sum(sequence.stats.drafted)
    for i, noted in enumerate(sequence.logprobs):
        past = sequence.tokens[: 2 + i]
        p = distribution_from_logits(
            logits(tuple(past)), CONFIG, token_counts=Counter(past[2:]), prompt_ids=PROMPT[:2]
        )
        assert noted.token_id == sequence.tokens[2 + i]
        assert exp(noted.logprob) == pytest.approx(p[noted.token_id], abs=1e-5)
        order = np.lexsort((np.arange(32), -p))[:3]
        assert [t for t, _ in noted.top] == [int(t) for t in order if p[t] > 0]


def test_a_round_tells_what_it_saw():
    seen = []
    logits = hashed_logits(16)
    sequence = new_sequence(
        ExactFamily(logits, 16), [1, 2], RandomDrafter(3), rule="block", depth=3, max_tokens=9
    )
    engine = Engine(16, seen.append)
    while sequence.finish_reason is None:
        engine.step([sequence])
    assert sequence.noted == []
    assert sequence.logprobs is None
    for each in seen:
        count = len(each.draft.tokens)
        assert each.sequence is sequence
        assert len(each.p_rows) == count + 1 == len(each.draft.q_rows) + 1
        assert each.logits.shape == (count + 1, 16)
        stop = each.start + len(each.emitted)
        assert sequence.tokens[each.start : stop] == each.emitted
        expected = logits(tuple(sequence.tokens[: each.start]))
        np.testing.assert_allclose(np.asarray(each.logits[0]), expected, atol=1e-6)
        assert each.verdict.accepted + 1 >= len(each.emitted)
        assert len(each.verdict.probabilities) == count
    assert sum(len(each.emitted) for each in seen) == 9


def test_what_a_listener_raises_reaches_the_caller_after_the_round():
    sequence = new_sequence(ExactFamily(hashed_logits(16), 16), [1, 2])

    def listener(each):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Engine(16, listener).step([sequence])
    assert len(sequence.tokens) == 3
    Engine(16).step([sequence])
    assert len(sequence.tokens) == 4
    assert sequence.error is None


def test_they_are_cut_with_the_ids():
    """A stop string reaches two tokens back; the ids and the logprobs end with its text."""
    family = ExactFamily(hashed_logits(8), 8)
    whole = run(new_sequence(family, [1], seed=2, max_tokens=12, top_logprobs=0))
    text = "".join(f"<{t}>" for t in whole.token_ids)
    stop = text[7:12]
    cut = run(
        new_sequence(
            family, [1], KnowingDrafter(1, whole.token_ids), depth=5, seed=2, max_tokens=12,
            top_logprobs=0, stops=[stop], detokenizer=Spelling(),
        )
    )  # fmt: skip
    assert 0 < len(cut.token_ids) < 12
    assert [each.token_id for each in cut.logprobs] == cut.token_ids
    np.testing.assert_array_equal(
        values(cut.logprobs), values(whole.logprobs)[: len(cut.token_ids)]
    )
    assert vocab_of(cut) == 8


def test_ties_and_small_supports():
    law = SparseDistribution(np.array([5, 2, 9]), np.array([1.0, 1.0, 2.0]), 12)
    noted = token_logprob(law, 2, 9)
    assert noted.logprob == pytest.approx(np.log(0.25))
    assert [token for token, _ in noted.top] == [9, 2, 5]
    assert token_logprob(law, 9, 0).top == ()
    assert token_logprob(SparseDistribution.one_hot(3, 4), 3, 2).top == ((3, 0.0),)


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_chunks_and_results_have_the_same(draft, tmp_path):
    bundle = mtplx.load(write_directory(tmp_path / "tiny"))
    how = {"seed": 3, "max_tokens": 20, "logprobs": True, "top_logprobs": 2, "draft": draft}
    stream = mtplx.stream(bundle, "a b a b a b", stop=["zz"], **how)
    chunks = list(stream)
    result = stream.result()
    assert [t for c in chunks for t in c.logprobs] == result.logprobs
    assert [t.token_id for t in result.logprobs] == result.token_ids
    assert all(len(c.logprobs) == len(c.token_ids) for c in chunks)
    assert all(each.logprob <= 0.0 for each in result.logprobs)
    bare = mtplx.generate(bundle, "a b a b a b", seed=3, max_tokens=20, draft=draft)
    assert bare.logprobs is None
    assert bare.token_ids == result.token_ids
