"""Drafts from a part of the vocabulary: the law is that part's, and the output stays exact."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mtplx.distribution import SparseDistribution
from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.fast_sampling import sparse_distribution_from_mlx_logits
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import speculative_output_marginal
from mtplx.sequence import History

VOCAB = 12
IDS = [1, 2, 5, 7, 11]


@pytest.mark.parametrize("ids", [[], [2, 1], [1, 1], [-1, 2], [0, VOCAB], [[1], [2]]])
def test_ids_that_are_none_of_a_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="draft ids"):
        DraftVocabulary(ids, VOCAB)


def test_widening_puts_every_probability_on_its_id():
    law = DraftVocabulary(IDS, VOCAB).widen(SparseDistribution([0, 3, 4], [0.5, 0.3, 0.2], 5))
    assert law.vocab_size == VOCAB
    assert dict(zip(law.token_ids.tolist(), law.probs.tolist(), strict=True)) == pytest.approx(
        {1: 0.5, 7: 0.3, 11: 0.2}
    )


def test_every_id_has_its_place_and_others_have_none():
    vocabulary = DraftVocabulary(IDS, VOCAB)
    assert [vocabulary.place(token) for token in (1, 5, 11, 0, 6)] == [0, 2, 4, None, None]


def test_one_that_is_joined_is_the_last_place_and_laws_have_their_ids_ascending():
    base = DraftVocabulary(IDS, VOCAB)
    for token in (0, 6, 8):
        more = base.joined(token)
        assert [more.place(t) for t in (1, 11, token, 9)] == [0, 4, 5, None]
        assert more.counts({token: 2, 9: 1, 1: 3}) == {5: 2, 0: 3}
        assert more.bias({token: 1.5, 9: 1.0}) == {5: 1.5}
        assert more.indices([9, token, 11]) == [5, 4]
        law = more.widen(SparseDistribution([0, 3, 4, 5], [0.5, 0.25, 0.125, 0.125], 6))
        assert law == SparseDistribution([1, 7, 11, token], [0.5, 0.25, 0.125, 0.125], VOCAB)
        only = more.widen(SparseDistribution([5], [1.0], 6))
        assert only == SparseDistribution([token], [1.0], VOCAB)
    assert base.place(6) is None
    assert len(base.ids) == len(IDS)


CONFIGS = [
    SamplerConfig(temperature=0.7, top_p=1.0, top_k=0),
    SamplerConfig(temperature=0.7, top_p=0.8, top_k=3),
    SamplerConfig(temperature=0.0),
    SamplerConfig(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.7,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={2: 1.5, 3: 4.0, 7: -2.0},
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_draft_law_is_the_law_of_a_vocabulary_with_nothing_else_in_it(config):
    """As if every other token were banned: bias and penalties reach the ids that they name."""
    random = np.random.default_rng(3)
    vocabulary, prompt, drafts = DraftVocabulary(IDS, VOCAB), [2, 3, 3, 11], [5, 5, 2]
    history = History(config, prompt)
    history.counts.update([7, 8, 7])
    for _ in range(20):
        logits = (2 * random.standard_normal(VOCAB)).astype(np.float32)
        found = history.draft_law(mx.array(logits[IDS]), drafts, vocabulary)
        banned = {t: -np.inf for t in range(VOCAB) if t not in IDS}
        only = SamplerConfig(
            **{**vars(config), "logit_bias": {**(config.logit_bias or {}), **banned}}
        )
        wanted = sparse_distribution_from_mlx_logits(
            mx.array(logits), only, token_counts=history.counts + Counter(drafts), prompt_ids=prompt
        )
        dense = [np.zeros(VOCAB), np.zeros(VOCAB)]
        for row, law in zip(dense, (found, wanted), strict=True):
            row[law.token_ids] = law.probs
        np.testing.assert_allclose(*dense, atol=1e-6)


def test_verification_gives_p_whatever_the_reduced_law_leaves_out():
    random = np.random.default_rng(5)
    vocabulary = DraftVocabulary(IDS, VOCAB)
    for _ in range(50):
        p = random.dirichlet(np.full(VOCAB, 0.5))
        q = vocabulary.widen(SparseDistribution(np.arange(5), random.dirichlet(np.ones(5)), 5))
        dense = np.zeros(VOCAB)
        dense[q.token_ids] = q.probs
        np.testing.assert_allclose(speculative_output_marginal(p, dense), p, atol=1e-12)


def test_nothing_is_drafted_where_every_draft_id_is_banned():
    """Plain decoding can go on, so drafting must not fail."""
    vocabulary, logits = DraftVocabulary(IDS, VOCAB), mx.zeros(len(IDS))
    banned = dict.fromkeys(IDS, -np.inf)
    for bias, drafted in ((banned, False), ({**banned, 5: -9.0}, True)):
        history = History(SamplerConfig(logit_bias=bias), [2])
        law = history.draft_law(logits, [], vocabulary)
        assert (law is not None) == drafted
        assert not drafted or law.token_ids.tolist() == [5]
