"""Drafts of adaptive depth, from two sources: the exact law, the same text, which source when."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from doubles import (
    GREEDY,
    PLAIN,
    WRONG,
    ExactFamily,
    RandomDrafter,
    asked,
    hashed_logits,
    new_sequence,
    randomise,
    run,
    same_or_near_tie,
    scripted_logits,
    tiny_llama,
)

import mtplx.depth
from mtplx.certify.cases import depth, markov
from mtplx.certify.enumeration import EXACT, FLIPS, Case, product_law
from mtplx.certify.forking import play_all
from mtplx.depth import COPY_LIMIT, DEFAULT_COSTS, HEAD_LIMIT, Costs
from mtplx.drafters import AutoDrafter, Draft, MTPDrafter, NgramDrafter, Proposal
from mtplx.fast_sampling import sparse_distribution_from_mlx_logits
from mtplx.mtp_patch import attach_head, new_head
from mtplx.rng import Draws
from mtplx.sampler_config import SamplerConfig
from mtplx.verify import RULES, verify

# Costs and priors under which what was drawn, kept and refused changes the next decision.
TIGHT = Costs((1.0, 1.3, 1.6, 1.9), 0.05)


# --- the joint law, by enumeration --------------------------------------------------------------


class Attached:
    """What ``MTPDrafter`` runs, without a head: the laws come from the proposal."""

    vocabulary = None
    copy_bonus = ()
    further = ()

    def new_cache(self):
        cache = SimpleNamespace(offset=0, state=[])
        cache.trim = lambda n: setattr(cache, "offset", cache.offset - n)
        return cache

    def forward(self, state, tokens, cache):
        cache.offset += state.shape[0]
        return state

    def logits(self, hidden):
        return mx.zeros((1, 8))


def auto(costs=TIGHT, *, mtp=True, ngram=True, wrap=lambda drafter: drafter):
    head = wrap(MTPDrafter(Attached())) if mtp else None
    return AutoDrafter(head, NgramDrafter(shortest=1, longest=2) if ngram else None, costs)


def play_rounds(noise, rule, case, drafter, prompt, most, seen):
    """``case.rounds`` rounds of the shipped drafter and rule; what they emit."""
    draws, history = Draws(1, 2), prompt
    drafter.observe(prompt, None)
    drafter.observe([], mx.zeros((len(prompt) - 1, 1)))

    def draw(offset, q):
        if rule == "coupled":
            return draws.race(len(history) + offset, q)
        return draws.draft(len(history), offset, q)

    for _ in range(case.rounds):
        known = history

        def law(logits, drafts, vocabulary, known=known):
            return case.q((*known, *drafts))

        draft = drafter.propose(most, Proposal(law, draw, case.vocab))
        drafts = tuple(draft.tokens)
        p_rows = [case.p(history + drafts[:i]) for i in range(len(drafts) + 1)]
        noise.flips = FLIPS[rule](p_rows, draft.q_rows, drafts)
        verdict = verify(rule, p_rows, draft.q_rows, drafts, draws, start=len(history))
        emitted = (*drafts[: verdict.accepted], verdict.next_token)
        drafter.observe(emitted, mx.zeros((len(emitted), 1)))
        seen[draft.source, len(drafts)] += noise.weight
        history += emitted
    return history[len(prompt) :]


def total_variation(monkeypatch, rule, case, new, prompt=(0, 1, 0), most=2):
    """(TV between what is emitted and the product of p, weight by (source, depth))."""
    seen: Counter = Counter()
    played: dict[tuple, float] = defaultdict(float)
    after = Case(lambda h: case.p(prompt + h), case.q, case.depth, case.vocab)

    def play(noise):
        return play_rounds(noise, rule, case, new(), prompt, most, seen)

    for weight, history in play_all(play):
        for whole, chance in product_law(after, history, case.longest).items():
            played[whole] += weight * chance
    assert abs(sum(played.values()) - 1.0) < EXACT
    exact = product_law(after, (), case.longest)
    apart = sum(abs(played[h] - exact.get(h, 0.0)) for h in played.keys() | exact.keys()) / 2
    return apart, seen


LAWS = {
    "two tokens": Case(markov(2, 1, order=2), markov(2, 2, sparse=True), depth(0), 2, rounds=3),
    "three tokens": Case(markov(3, 5, order=2), markov(3, 6, sparse=True), depth(0), 3, rounds=2),
    "zeros": Case(markov(3, 23, 0.4, 2), markov(3, 10, 0.4, sparse=True), depth(0), 3, rounds=2),
    "p = q": Case(markov(3, 15), markov(3, 15, sparse=True), depth(0), 3, rounds=2),
}


@pytest.fixture
def swayed(monkeypatch):
    """One draft kept or refused is enough to change the next round."""
    monkeypatch.setattr(mtplx.depth, "PRIOR_WEIGHT", 0.5)
    monkeypatch.setattr(mtplx.depth, "PROBE_EVERY", 3)
    monkeypatch.setattr(mtplx.depth, "COPY_PRIORS", (0.5, 0.7, 0.7))


@pytest.mark.parametrize("case", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_with_an_adaptive_depth_is_the_product_of_p(rule, case, monkeypatch, swayed):
    apart, seen = total_variation(monkeypatch, rule, case, lambda: auto(ngram=False))
    assert apart <= EXACT
    assert len(seen) > 1, "depths must differ for this test to mean anything"


@pytest.mark.parametrize("case", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_with_two_sources_is_the_product_of_p(rule, case, monkeypatch, swayed):
    apart, seen = total_variation(monkeypatch, rule, case, auto)
    assert apart <= EXACT
    assert {source for source, _ in seen} >= {"mtp", "ngram"}


def test_the_joint_law_of_copies_alone_is_the_product_of_p(monkeypatch, swayed):
    for case in LAWS.values():
        apart, _ = total_variation(monkeypatch, "token", case, lambda: auto(mtp=False), most=3)
        assert apart <= EXACT


class Dropping:
    """Wrong: draws a token, and throws it away if it looks unlikely."""

    def __init__(self, inner):
        self.inner, self.name, self.needs_hidden = inner, inner.name, inner.needs_hidden
        self.observe = inner.observe

    def propose(self, depth, proposal):
        draft = self.inner.propose(depth, proposal)
        sure = [q.probability(t) for q, t in zip(draft.q_rows, draft.tokens, strict=True)]
        keep = next((i for i, share in enumerate(sure) if share < 0.5), len(sure))
        return Draft(draft.tokens[:keep], draft.q_rows[:keep], draft.source)


class Comparing(AutoDrafter):
    """Wrong: copies if the head drew another token than would be copied."""

    def propose(self, depth, proposal):
        draft = self.mtp.propose(depth, proposal)
        match = self.ngram.match(depth)
        if match is None or not draft.tokens or draft.tokens[0] == match.tokens[0]:
            return draft
        return self.ngram.propose(depth, proposal)


def test_dropping_an_unlikely_token_is_caught(monkeypatch, swayed):
    case = LAWS["three tokens"]
    apart, _ = total_variation(monkeypatch, "token", case, lambda: auto(wrap=Dropping))
    assert apart > WRONG


def test_choosing_a_source_by_the_token_drawn_is_caught(monkeypatch, swayed):
    def comparing():
        return Comparing(MTPDrafter(Attached()), NgramDrafter(shortest=1, longest=2), TIGHT)

    apart, _ = total_variation(monkeypatch, "token", LAWS["three tokens"], comparing)
    assert apart > WRONG
    apart, _ = total_variation(monkeypatch, "coupled", LAWS["three tokens"], comparing)
    assert apart <= EXACT, "under the coupled rule drafts only propose"


# --- what decisions see -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trunk():
    return tiny_llama(1)


@pytest.fixture(scope="module")
def attached(trunk):
    head = new_head(trunk)
    randomise(head, 2)
    return attach_head(trunk, head)


def fed(attached):
    drafter = MTPDrafter(attached)
    drafter.observe([3, 17, 5, 29], None)
    drafter.observe([], mx.random.normal((3, 32), key=mx.random.key(0)))
    return drafter


@pytest.mark.parametrize("stop", range(5))
def test_a_head_asks_before_each_draw_and_tells_placed_drafts_only(attached, stop):
    events, draw, more = asked(stop)
    proposal = Proposal(
        lambda logits, *_: sparse_distribution_from_mlx_logits(logits, PLAIN), draw, 64, more
    )
    drafter = fed(attached)
    draft = drafter.propose(8, proposal)
    assert len(draft.tokens) == stop
    sure = [q.probability(t) for q, t in zip(draft.q_rows, draft.tokens, strict=True)]
    expected = []
    for i in range(stop):
        expected += [("more", sure[:i]), ("draw", i)]
    assert events == [*expected, ("more", sure)]
    assert drafter.rows == (3 if stop else 0), "nothing is spent before the first answer"


def test_rows_that_waited_are_fed_later_in_one_go(attached):
    """Rounds that drafted nothing leave no gap in the head's cache."""
    waiting, prompt = fed(attached), fed(attached)
    never = Proposal(lambda *_: pytest.fail("a law"), lambda *_: 0, 64, lambda _: False)
    drawing = Proposal(lambda logits, *_: Law(logits), lambda i, q: i + 1, 64)
    for i in range(4):
        rows = mx.random.normal((1, 32), key=mx.random.key(i))
        assert waiting.propose(4, never).tokens == []
        prompt.propose(1, drawing)
        for drafter in (waiting, prompt):
            drafter.observe([7 + i], rows)
    one, other = waiting.propose(2, drawing), prompt.propose(2, drawing)
    assert waiting.rows == prompt.rows == 7
    for a, b in zip(one.q_rows, other.q_rows, strict=True):
        np.testing.assert_allclose(a.logits, b.logits, atol=1e-5)


class Law:
    def __init__(self, logits):
        self.logits = np.asarray(logits)

    def probability(self, token):
        return 0.5


# --- the engine ---------------------------------------------------------------------------------


class Asking(RandomDrafter):
    """A random drafter that asks whether to go on, as a head does."""

    name = "mtp"

    def propose(self, depth, proposal):
        draft, sure = Draft([], []), []
        while len(draft.tokens) < depth and proposal.more(sure):
            draft = super().propose(len(draft.tokens) + 1, proposal)
            sure = [q.probability(t) for q, t in zip(draft.q_rows, draft.tokens, strict=True)]
        return Draft(draft.tokens, draft.q_rows, self.name)


def adaptive(head, costs=DEFAULT_COSTS):
    return AutoDrafter(head, NgramDrafter(shortest=1, longest=3), costs)


def test_coupled_output_on_an_exact_trunk_is_plain_decodings():
    family, sources = ExactFamily(hashed_logits(16), 16), Counter()
    for seed in range(16):
        config = SamplerConfig(temperature=(0.0, 0.3, 0.6, 1.0)[seed % 4], top_p=0.95, top_k=20)
        plain = run(new_sequence(family, [9, 4], seed=seed, config=config, max_tokens=40))
        sequence = new_sequence(
            family, [9, 4], adaptive(Asking(seed)), depth=COPY_LIMIT, seed=seed, config=config,
            max_tokens=40,
        )  # fmt: skip
        assert run(sequence).tokens == plain.tokens
        for name, counts in sequence.stats.sources.items():
            sources[name] += counts["rounds"]
        assert sum(c["emitted"] for c in sequence.stats.sources.values()) == sequence.stats.emitted
        assert sum(c["rounds"] for c in sequence.stats.sources.values()) == sequence.stats.rounds
    assert set(sources) == {"mtp", "ngram", "none"}


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_coupled_output_with_a_head_is_plain_decodings(trunk, attached, temperature):
    config, near_ties = SamplerConfig(temperature=temperature, top_p=0.95, top_k=20), 0
    for seed in range(4):
        plain = run(new_sequence(trunk, [9, 4, 31], seed=seed, config=config, max_tokens=24))
        sequence = new_sequence(
            trunk, [9, 4, 31], adaptive(MTPDrafter(attached)), depth=COPY_LIMIT, seed=seed,
            config=config, max_tokens=24,
        )  # fmt: skip
        near_ties += same_or_near_tie(plain, run(sequence)) is not None
    assert near_ties <= 1


def test_a_seed_repeats_output_and_depths_under_the_token_rule(trunk, attached):
    def once(costs=DEFAULT_COSTS):
        sequence = new_sequence(
            trunk, [9, 4, 31], adaptive(MTPDrafter(attached), costs), rule="token",
            depth=COPY_LIMIT, seed=3, max_tokens=40,
        )  # fmt: skip
        stats = run(sequence).stats
        return sequence.tokens, stats.drafted, stats.accepted, stats.sources

    first = once()
    assert once() == first
    assert once(Costs((1.0, 1.01), 0.0))[1:] != first[1:], "costs decide, so they are reported"


def test_copies_where_the_text_repeats_and_the_head_elsewhere():
    period = [5, 6, 7, 8, 9, 10, 11, 12]
    family = ExactFamily(scripted_logits(period * 12, 1, 16), 16)
    copying = new_sequence(family, [3], adaptive(Asking(1)), depth=COPY_LIMIT, max_tokens=80)
    stats = run(copying).stats
    assert stats.sources["ngram"]["emitted"] > 50
    assert stats.acceptance_length > 3
    random = ExactFamily(hashed_logits(4096, order=3, scale=3), 4096)
    sequence = new_sequence(random, [3, 4], adaptive(Asking(1)), depth=COPY_LIMIT, max_tokens=150)
    stats = run(sequence).stats
    assert stats.sources["none"]["rounds"] > 0.7 * stats.rounds, "nothing pays here"
    assert stats.sources.get("ngram", {"rounds": 0})["rounds"] < 10


@pytest.mark.parametrize("left", range(1, 6))
def test_depth_never_passes_max_tokens_or_the_limits(left):
    family = ExactFamily(scripted_logits([1] * 60, 6, 4), 4)
    for drafter in (
        AutoDrafter(None, NgramDrafter(shortest=1), Costs((1.0, 1.0), 0.0)),
        AutoDrafter(Asking(0), None, Costs((1.0, 1.0), 0.0)),
    ):
        sequence = new_sequence(family, [1] * 6, drafter, depth=COPY_LIMIT, max_tokens=40 + left)
        stats = run(sequence).stats
        assert len(sequence.token_ids) == 40 + left
        assert len(stats.drafted) <= (HEAD_LIMIT if drafter.name == "mtp" else COPY_LIMIT)
        nothing = Proposal(lambda *_: pytest.fail("a law"), lambda *_: 0, 4)
        assert drafter.propose(0, nothing).tokens == []


def test_the_name_is_of_what_is_held(attached):
    head, ngram = MTPDrafter(attached), NgramDrafter()
    names = [AutoDrafter(a, b, TIGHT).name for a, b in ((head, ngram), (head, None), (None, ngram))]
    assert names == ["auto", "mtp", "ngram"]
    assert not AutoDrafter(None, ngram, TIGHT).needs_hidden
    assert AutoDrafter(head, ngram, TIGHT).needs_hidden


def test_greedy_output_is_plain_decodings_under_both_rules(trunk, attached):
    plain = run(new_sequence(trunk, [9, 4, 31], config=GREEDY, max_tokens=24))
    for rule in sorted(RULES):
        sequence = new_sequence(
            trunk, [9, 4, 31], adaptive(MTPDrafter(attached)), rule=rule, depth=COPY_LIMIT,
            config=GREEDY, max_tokens=24,
        )  # fmt: skip
        assert same_or_near_tie(plain, run(sequence)) is None


def test_the_default_drafters_read_one_index():
    trunk = tiny_llama(1)
    head = new_head(trunk)
    for bonus, shared in (((0.5,), False), ((0.5,) * 8, True)):
        head.copy_bonus = bonus
        model = MTPDrafter(attach_head(trunk, head))
        copies = NgramDrafter(model.index)
        drafter = AutoDrafter(model, copies, TIGHT)
        drafter.observe([1, 2, 3, 1, 2], None)
        assert (copies.index is model.index) == shared
        assert copies.index.tokens == model.index.tokens == [1, 2, 3, 1, 2]
        assert copies.match(1).tokens == [3]
