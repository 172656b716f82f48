"""The draft model's state: each committed token once, whatever is rejected or interrupted."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import test_state
from doubles import PLAIN, ExactFamily, asked, check_state, hashed_logits, new_sequence

from mtplx.drafters import ModelDrafter, Proposal
from mtplx.drafters.model import SharedVocabulary
from mtplx.engine import Engine
from mtplx.errors import NonFiniteLogitsError
from mtplx.fast_sampling import sparse_distribution_from_mlx_logits


def same(vocab):
    names = [str(i) for i in range(vocab)]
    return SharedVocabulary(names, names)


def proposal(draw=None, more=None):
    """Draws the likeliest token but one."""

    def second(offset, q):
        return int(q.token_ids[np.argsort(-q.probs, kind="stable")[min(1, len(q.probs) - 1)]])

    return Proposal(
        lambda logits, *_: sparse_distribution_from_mlx_logits(logits, PLAIN),
        draw or second,
        test_state.VOCAB,
        *([more] if more else []),
    )


def drafter_of(kind="plain"):
    drafter = ModelDrafter(test_state.new_state(kind).family, same(test_state.VOCAB))
    drafter.state = test_state.new_state(kind)
    return drafter


def assert_committed(drafter, kind, tokens):
    """The state is a prefill of the committed tokens; looking leaves it as it was."""
    assert drafter.ids == tokens
    mark = drafter.state.mark(8)
    test_state.assert_is_prefill_of(drafter.state, kind, tokens)
    drafter.state.restore(mark)


@pytest.fixture
def no_compiler():
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("kind", test_state.MODELS)
@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.usefixtures("no_compiler")
def test_the_state_is_a_fresh_prefill_after_rejections_at_every_position(kind, depth):
    drafter, tokens = drafter_of(kind), list(test_state.PROMPT[:5])
    drafter.observe(tokens, None)
    for keep in [*range(depth + 1), depth, 0]:
        draft = drafter.propose(depth, proposal())
        assert len(draft.tokens) == len(draft.q_rows) == depth
        assert_committed(drafter, kind, tokens)
        other = (draft.tokens[min(keep, depth - 1)] + 1) % test_state.VOCAB
        emitted = [*draft.tokens[:keep], other]
        tokens = tokens + emitted
        drafter.observe(emitted, None)
    drafter.propose(1, proposal())
    assert_committed(drafter, kind, tokens)


def test_asking_twice_gives_the_same_draft():
    drafter = drafter_of()
    drafter.observe([3, 17, 5], None)
    first = drafter.propose(3, proposal())
    assert drafter.propose(3, proposal()) == first
    assert drafter.propose(0, proposal()).tokens == []
    assert drafter.propose(2, proposal()).tokens == first.tokens[:2]


@pytest.mark.parametrize("stop", range(4))
def test_it_asks_before_each_draw_and_runs_nothing_before_the_first_answer(stop):
    events, draw, more = asked(stop)
    drafter = drafter_of()
    drafter.observe([3, 17, 5], None)
    draft = drafter.propose(8, proposal(draw, more))
    sure = [q.probability(t) for q, t in zip(draft.q_rows, draft.tokens, strict=True)]
    expected = [("more", [])]
    for i in range(stop):
        expected += [("draw", i), ("more", sure[: i + 1])]
    assert events == expected
    assert drafter.state.length == (3 if stop else 0)


class Failing:
    """Calls through, and raises at the call ``at``: before it, or when it is done."""

    def __init__(self, inner, at, after):
        self.inner, self.left, self.after = inner, at, after

    def __call__(self, *args):
        self.left -= 1
        if self.left == -1 and not self.after:
            raise KeyboardInterrupt
        done = self.inner(*args)
        if self.left == -1:
            raise KeyboardInterrupt
        return done


SPOTS = [
    *[("draw", i) for i in range(3)],
    *[("law", i) for i in range(3)],
    *[("forward", i) for i in range(3)],
    *[("mark", i) for i in range(2)],
    ("restore", 0),
]


@pytest.mark.parametrize("kind", ["plain", "rotating", "recurrent", "gated delta + attention"])
@pytest.mark.parametrize("late", [2, 20])
@pytest.mark.usefixtures("no_compiler")
def test_an_interrupted_proposal_never_was(kind, late, monkeypatch):
    tokens = list(test_state.PROMPT)
    before, after = tokens[:-late] or tokens[:1], tokens
    undisturbed = drafter_of(kind)
    undisturbed.observe(after, None)
    want = undisturbed.propose(3, proposal())
    for (name, at), when in [(spot, when) for spot in SPOTS for when in (False, True)]:
        drafter, asked = drafter_of(kind), proposal()
        drafter.observe(before, None)
        drafter.propose(2, proposal())
        drafter.observe(after[len(before) :], None)
        with monkeypatch.context() as patch:
            if name in ("draw", "law"):
                asked = replace(asked, **{name: Failing(getattr(asked, name), at, when)})
            else:
                target = drafter.state.family if name == "forward" else drafter.state
                patch.setattr(target, name, Failing(getattr(target, name), at, when))
            with pytest.raises(KeyboardInterrupt):
                drafter.propose(3, asked)
        if name != "restore":  # interrupted while it took back: the next proposal does that
            assert drafter.state.length >= len(before)
            assert_committed_so_far(drafter, kind)
        assert drafter.propose(3, proposal()).tokens == want.tokens
        assert_committed(drafter, kind, after)


def assert_committed_so_far(drafter, kind):
    mark = drafter.state.mark(8)
    held = drafter.ids[: drafter.state.length]
    test_state.assert_is_prefill_of(drafter.state, kind, held)
    drafter.state.restore(mark)


def test_a_prompt_is_run_in_chunks_and_an_interrupt_keeps_those_that_are_done(monkeypatch):
    family, chunks = ExactFamily(hashed_logits(8), 8), []
    prefill = family.prefill

    def counted(tokens, cache):
        chunks.append(tokens.shape[1])
        if len(chunks) == 2:
            raise KeyboardInterrupt
        return prefill(tokens, cache)

    monkeypatch.setattr(family, "prefill", counted)
    drafter = ModelDrafter(family, same(8))
    drafter.observe([i % 8 for i in range(1100)], None)
    with pytest.raises(KeyboardInterrupt):
        drafter.propose(2, proposal())
    assert drafter.state.length == 512
    drafter.propose(2, proposal())
    assert chunks == [512, 512, 512, 1099 - 1024]
    assert family.rows == [1, 1]
    assert drafter.state.length == 1100


def test_a_round_runs_what_was_emitted_once():
    family = ExactFamily(hashed_logits(16), 16)
    drafter = ModelDrafter(ExactFamily(hashed_logits(16, seed=4), 16), same(16))
    sequence = new_sequence(family, [9, 4], drafter, rule="coupled", depth=3, max_tokens=30)
    engine = Engine(16)
    while sequence.finish_reason is None:
        engine.step([sequence])
        check_state(sequence)
        held = np.asarray(drafter.state.caches[0].keys_and_values()[0]).reshape(-1)
        assert held.astype(int).tolist() == sequence.tokens[: drafter.state.length]
    rows, last = drafter.state.family.rows, drafter.state.length
    drafted = sequence.stats.drafted
    assert sum(rows) == last + sum(drafted) - drafted[0]


def test_nothing_is_drafted_behind_the_draft_models_context():
    drafter = ModelDrafter(ExactFamily(hashed_logits(8), 8), same(8), context=10)
    for length, want in ((7, 4), (8, 3), (10, 1), (11, 0), (12, 0)):
        drafter.observe([1] * (length - len(drafter.ids)), None)
        assert len(drafter.propose(5, proposal()).tokens) == min(5, want)
        assert max(drafter.state.length, 0) <= 10


def test_logits_that_are_not_finite_name_the_draft_model():
    family = ExactFamily(lambda prefix: np.full(8, np.nan), 8)
    sequence = new_sequence(
        ExactFamily(hashed_logits(8), 8), [1, 2], ModelDrafter(family, same(8)), depth=2
    )
    with pytest.raises(NonFiniteLogitsError, match=r"draft model.*--draft none"):
        Engine(8).step([sequence])
    assert sequence.tokens == [1, 2]
