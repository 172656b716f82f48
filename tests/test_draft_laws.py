"""q is the law that each draft of the head was drawn from."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from doubles import GREEDY, PLAIN, new_sequence, run, tiny_llama
from test_drafters import COPY_BONUS, VOCAB, head_of

from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.drafters import MTPDrafter
from mtplx.engine import Engine
from mtplx.errors import NonFiniteLogitsError
from mtplx.families import family_of
from mtplx.mtp_patch import attach_head
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits
from mtplx.state import State


@pytest.fixture(scope="module")
def trunk():
    return tiny_llama(1)


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        GREEDY,
        SamplerConfig(temperature=0.6, top_p=0.9, top_k=7),
        SamplerConfig(temperature=0.8, top_p=1.0, top_k=0, min_p=0.05, presence_penalty=1.5,
                      repetition_penalty=1.3),
        SamplerConfig(temperature=0.9, top_p=1.0, top_k=0, frequency_penalty=0.7,
                      logit_bias={9: 2.5, 31: -np.inf, 5: 1.0}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ids", [None, [1, 5, 6, 11, 12, 27]])
def test_q_is_the_law_each_draft_was_drawn_from(trunk, config, ids):
    """q_rows are the very laws given to ``draw``, and those are what the head's logits mean."""
    head = head_of(trunk)
    head.vocabulary = None if ids is None else DraftVocabulary(ids, VOCAB)
    attached = attach_head(trunk, head)
    drafter = MTPDrafter(attached)
    sequence = new_sequence(
        trunk, [9, 4, 4, 31], drafter, rule="token", depth=4, config=config, max_tokens=30, seed=3
    )
    seen = []
    original = sequence.draws.draft

    class Watching:
        seed = sequence.draws.seed

        def __getattr__(self, name):
            return getattr(original.__self__, name)

        def draft(self, start, offset, q):
            token = original(start, offset, q)
            seen.append((start, offset, q, token))
            return token

    sequence.draws = Watching()
    engine = Engine(VOCAB)
    for _ in range(4):
        engine._prefill(sequence)
        del seen[:]
        draft = engine._draft(sequence, 4)
        assert [q for _, _, q, _ in seen] == draft.q_rows
        assert [token for *_, token in seen] == draft.tokens
        assert [(s, o) for s, o, _, _ in seen] == [(len(sequence.tokens), i) for i in range(4)]
        assert_laws_of_the_head(trunk, attached, sequence, draft, config)
        engine._round(sequence)


def follows(tokens, drafts):
    """The longest suffix that occurred in ``tokens``, and what followed it there the last time."""
    whole = [*tokens, *drafts]
    for n in range(len(COPY_BONUS), 0, -1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if len(whole) >= n and tokens[at - n : at] == whole[-n:]:
                return n, tokens[at]
    return None


def assert_laws_of_the_head(trunk, attached, sequence, draft, config):
    """Recompute every q from scratch with the reference law."""
    tokens = sequence.tokens
    (hidden,) = State(family_of(trunk)).prefill(tokens[:-1])
    cache = attached.new_cache()
    row = attached.forward(hidden, mx.array(tokens[1:]), cache)[-1:]
    output = tokens[sequence.prompt_length :]
    for i, q in enumerate(draft.q_rows):
        past = [*output, *draft.tokens[:i]]
        logits, vocabulary = np.full(VOCAB, -np.inf), attached.vocabulary
        ids = np.arange(VOCAB) if vocabulary is None else vocabulary.ids
        logits[ids] = np.array(attached.logits(row)[0])
        copied = follows(tokens, draft.tokens[:i])
        if copied is not None:
            if logits[copied[1]] == -np.inf:
                weight = np.array(attached.family.output_rows(np.array(copied[1:])))
                logits[copied[1]] = (weight @ np.array(row)[0]).item()
            logits[copied[1]] += COPY_BONUS[copied[0] - 1]
        want = distribution_from_logits(
            logits,
            config,
            token_counts={t: past.count(t) for t in past},
            prompt_ids=tokens[: sequence.prompt_length],
        )
        np.testing.assert_allclose(q.to_dense(), want, rtol=0, atol=1e-4)
        assert q.probability(draft.tokens[i]) > 0
        row = attached.forward(row, mx.array([draft.tokens[i]]), cache)


def test_a_head_that_is_not_finite_is_an_error(trunk):
    head = head_of(trunk)
    head.norm.weight = mx.full((32,), float("nan"))
    drafter = MTPDrafter(attach_head(trunk, head))
    sequence = new_sequence(trunk, [9, 4, 4], drafter, depth=2)
    with pytest.raises(NonFiniteLogitsError):
        run(sequence)
    assert drafter.rows == 2
    assert sequence.tokens == [9, 4, 4]
