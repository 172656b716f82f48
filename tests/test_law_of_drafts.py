"""The joint law with the head's own draft laws, by enumeration: reduced vocabulary, copy bonus.

Rounds are played as in ``test_auto``. Here q comes from ``History.draft_law`` on the logits of a
small head, raised by the drafter's copy bonus, and p from ``History.laws`` on fixed logits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import test_auto
from doubles import PLAIN, WRONG
from test_auto import Attached, swayed, total_variation  # noqa: F401

from mtplx.certify.cases import depth
from mtplx.certify.engine_play import hashed_logits
from mtplx.certify.enumeration import EXACT, Case, product_law
from mtplx.depth import Costs
from mtplx.distribution import as_dense
from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.drafters import AutoDrafter, Draft, MTPDrafter, NgramDrafter
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits
from mtplx.sequence import History

# The 0 1 at its end was followed by 2, which is a draft id; 0 is followed by 1, which is none.
PROMPT = (0, 1, 2, 0, 1)
TWO, THREE = DraftVocabulary([0, 2], 4), DraftVocabulary([0, 2, 3], 4)
# Under the coupled rule one noise serves many races: the triangle of ``forking`` holds three.
OF_THREE = DraftVocabulary([0, 2], 3)
PLACES = [("token", TWO), ("token", THREE), ("coupled", OF_THREE), ("block", TWO)]
PENALTIES = SamplerConfig(1.0, 1.0, 0, 0.5, -0.25, 0.0, 2.0, {0: 1.5, 1: 0.5, 2: -0.75})
FILTERS = SamplerConfig(temperature=1.5, top_p=0.9, min_p=0.05, frequency_penalty=0.5)
CONFIGS = {"plain": PLAIN, "penalties": PENALTIES, "filters": FILTERS}


@cache
def logits(seed, vocab, context):
    """In eighths, so that float32 adds bias and penalties exactly."""
    return np.round(8 * hashed_logits(vocab, seed=seed)(context)) / 8


class Head(Attached):
    """What ``MTPDrafter`` runs: fixed logits by the latest token, of the draft ids only."""

    copy_bonus = (0.5, 2.5, 4.0)

    def __init__(self, vocabulary):
        vocab = vocabulary.vocab_size
        rows = [logits(1, vocab, (token,)) for token in range(vocab)]
        self.vocabulary, self.table = vocabulary, mx.array(np.array(rows, np.float32))

    def forward(self, state, tokens, cache):
        super().forward(state, tokens, cache)
        return tokens[:, None]

    def logits(self, hidden):
        return self.table[hidden[:, 0]][:, mx.array(self.vocabulary.ids)]

    def joined(self, logits, hidden, token):
        return mx.concatenate([logits, self.table[hidden[:, 0], token][:, None]], axis=-1)


@cache
def draft_law(config, output, drafts, vocabulary, row):
    history = History(config, PROMPT)
    history.counts.update(output)
    return history.draft_law(mx.array(np.frombuffer(row, np.float32)), drafts, vocabulary)


@cache
def target_law(config, vocab, context, counts):
    """The shipped p, held against the reference; its latest token is put in as a draft."""
    counts, row = Counter(dict(counts)), logits(0, vocab, context)
    history, drafts = History(config, PROMPT), context[-1:] if counts else ()
    history.counts = counts - Counter(drafts)
    p = history.laws(mx.array(np.array([row] * (len(drafts) + 1), np.float32)), drafts)[-1]
    exact = distribution_from_logits(row, config, token_counts=counts, prompt_ids=PROMPT)
    np.testing.assert_allclose(as_dense(p), exact, rtol=0, atol=1e-14)
    return p


class WithHistory:
    """The engine's part: the law of drafts after what is committed, and a depth for each round."""

    def __init__(self, drafter, config, depths):
        self.drafter, self.config, self.depths, self.tokens = drafter, config, depths, ()

    def observe(self, tokens, hidden):
        self.tokens += tuple(tokens)
        self.drafter.observe(tokens, hidden)

    def propose(self, depth, proposal):
        most, *self.depths = self.depths
        return self.drafter.propose(most, replace(proposal, law=self.law))

    def law(self, logits, drafts, vocabulary):
        output, row = self.tokens[len(PROMPT) :], np.asarray(logits).tobytes()
        return draft_law(self.config, output, tuple(drafts), vocabulary, row)


class Watched(MTPDrafter):
    """The shipped drafter; notes at which offsets what got the bonus, None where nothing did."""

    def __init__(self, vocabulary, given):
        super().__init__(Head(vocabulary))
        self.given, self.unraised = given, []

    def _logits(self, head, hidden, drafts):
        plain, found = head.logits(hidden), self.index.find(drafts)
        self.given.add((len(drafts), None if found is None else self.tokens[found[1]]))
        self.unraised.append((plain, tuple(drafts)))
        return super()._logits(head, hidden, drafts)


class Unrecorded(Watched):
    """Wrong: draws by the law with the bonus and records the law without it."""

    def propose(self, depth, proposal):
        self.unraised = []
        draft = super().propose(depth, proposal)
        rows = [proposal.law(*args, self.attached.vocabulary) for args in self.unraised]
        return Draft(draft.tokens, rows, draft.source)


def played(monkeypatch, rule, config, vocabulary, depths, new):
    """(TV, {(source, depth)}, what ``Watched`` noted) of one round for each of ``depths``."""
    vocab, rounds, given = vocabulary.vocab_size, len(depths), set()

    @cache
    def p(history):
        counts = Counter(history[len(PROMPT) :])
        return target_law(config, vocab, history[-2:], tuple(sorted(counts.items())))

    def fresh():
        return WithHistory(new(vocabulary, given), config, depths)

    case = Case(p, None, depth(0), vocab, rounds=rounds, longest=sum(depths) + rounds)
    with monkeypatch.context() as patch:
        patch.setattr(test_auto, "product_law", cache(product_law))
        apart, seen = total_variation(patch, rule, case, fresh, PROMPT)
    return apart, set(seen), given


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("rule", "vocabulary"), PLACES)
def test_the_joint_law_is_the_product_of_p(rule, vocabulary, config, monkeypatch):
    depths = (2, 1) if vocabulary is THREE else (3, 1)
    apart, seen, given = played(monkeypatch, rule, config, vocabulary, depths, Watched)
    assert apart <= EXACT
    assert seen == {("mtp", k) for k in depths}
    assert {(0, 1), (0, 2), (1, 0)} <= given, "1 is no draft id, and joins them"
    assert vocabulary is OF_THREE or (0, None) in given, "of three tokens each occurred before"


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(("rule", "vocabulary"), [PLACES[0], *PLACES[2:]])
@pytest.mark.usefixtures("swayed")
def test_the_joint_law_with_an_adaptive_depth(rule, vocabulary, copies, monkeypatch):
    def auto(vocabulary, given):
        ngram = NgramDrafter(shortest=1, longest=2) if copies else None
        return AutoDrafter(Watched(vocabulary, given), ngram, Costs((1.0, 1.1, 1.2, 1.3), 0.05))

    apart, seen, given = played(monkeypatch, rule, PENALTIES, vocabulary, (3, 2), auto)
    assert apart <= EXACT
    assert len({k for _, k in seen}) > 1, "depths must differ for this test to mean anything"
    assert {source for source, k in seen if k} == ({"mtp", "ngram"} if copies else {"mtp"})
    assert {0, 1} <= {token for _, token in given}


@pytest.mark.parametrize(("rule", "vocabulary"), [PLACES[0], *PLACES[2:]])
def test_only_a_copy_is_drafted_where_every_draft_id_is_banned(rule, vocabulary, monkeypatch):
    drafted = set()

    class Noting(Watched):
        def propose(self, depth, proposal):
            draft = super().propose(depth, proposal)
            drafted.update(draft.tokens)
            return draft

    config = replace(PLAIN, logit_bias={0: -np.inf, 2: -np.inf})
    apart, seen, _ = played(monkeypatch, rule, config, vocabulary, (2, 2), Noting)
    assert apart <= EXACT
    assert ("mtp", 0) in seen
    assert drafted == {1}


@pytest.mark.filterwarnings("ignore:divide by zero")  # what joined has no q in the wrong law
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_recording_q_without_the_bonus_is_caught(config, monkeypatch):
    apart, *_ = played(monkeypatch, "token", config, TWO, (2, 1), Unrecorded)
    assert apart > WRONG
    apart, *_ = played(monkeypatch, "coupled", config, OF_THREE, (2, 1), Unrecorded)
    assert apart <= EXACT, "under the coupled rule drafts only propose"
