"""Rounds that are interrupted or fail never were; sequences do not feel each other."""

from __future__ import annotations

import pytest
from doubles import (
    ExactFamily,
    RandomDrafter,
    check_state,
    hashed_logits,
    new_sequence,
    randomise,
    run,
    tiny_llama,
)

from mtplx.drafters import Draft, ModelDrafter, MTPDrafter, NgramDrafter
from mtplx.drafters.model import SharedVocabulary
from mtplx.engine import Engine
from mtplx.errors import NonFiniteLogitsError, StateError
from mtplx.families import family_of
from mtplx.mtp_patch import attach_head, new_head
from mtplx.sampler_config import SamplerConfig

PROMPT = [9, 4, 31, 9, 4]
RULES = ("token", "block", "coupled")


@pytest.fixture(scope="module")
def trunk():
    return tiny_llama(1)


@pytest.fixture(scope="module")
def head(trunk):
    head = new_head(trunk)
    randomise(head, 2)
    return head


def sampling(temperature, **more):
    return SamplerConfig(temperature=temperature, top_p=0.95, top_k=20, **more)


# --- interruptions --------------------------------------------------------------------------------


class Once:
    """Calls through, but raises the first time ``armed``."""

    def __init__(self, inner, error, after=False):
        self.inner, self.error, self.after, self.armed = inner, error, after, False

    def __call__(self, *args, **kwargs):
        if self.armed:
            self.armed = False
            if self.after:
                self.inner(*args, **kwargs)
            raise self.error
        return self.inner(*args, **kwargs)


def places(sequence, monkeypatch):
    """Where a round can be interrupted, by name: an object to arm."""
    import mtplx.engine

    family, drafter = sequence.state.family, sequence.drafter
    out = {
        "drafter": Once(drafter.propose, RuntimeError("draft"), after=True),
        "forward, before": Once(family.forward, RuntimeError("forward")),
        "forward, caches written": Once(family.forward, MemoryError(), after=True),
        "law": Once(sequence.history.laws, KeyboardInterrupt()),
        "verify": Once(mtplx.engine.verify, KeyboardInterrupt(), after=True),
        "rollback": Once(sequence.state.rollback, KeyboardInterrupt(), after=True),
    }
    monkeypatch.setattr(drafter, "propose", out["drafter"])
    monkeypatch.setattr(sequence.history, "laws", out["law"])
    monkeypatch.setattr(mtplx.engine, "verify", out["verify"])
    monkeypatch.setattr(sequence.state, "rollback", out["rollback"])

    def forward(*args):
        early = out["forward, before"]
        return (early if early.armed else out["forward, caches written"])(*args)

    monkeypatch.setattr(family, "forward", forward)
    return out


PLACES = (
    "drafter", "forward, before", "forward, caches written", "law", "verify", "rollback",
)  # fmt: skip


def snapshot(sequence):
    return (
        list(sequence.tokens), list(sequence.segments), sequence.state.length,
        dict(sequence.history.counts), sequence.stats.rounds, sequence.stats.tokens,
        list(sequence.stats.drafted), sequence.finish_reason, sequence.output.kept_tokens(),
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["exact", "mtp", "model", "sliding"])
def test_an_interrupted_round_never_was(rule, place, kind, trunk, head, monkeypatch):
    config = sampling(0.9, presence_penalty=0.5)

    def fresh():
        if kind == "exact":
            drafter, model = RandomDrafter(2), ExactFamily(hashed_logits(16), 16)
        elif kind == "mtp":
            drafter, model = MTPDrafter(attach_head(trunk, head)), trunk
        elif kind == "model":
            names = [str(i) for i in range(64)]
            family = family_of(tiny_llama(1, num_hidden_layers=1))
            drafter, model = ModelDrafter(family, SharedVocabulary(names, names)), trunk
        else:
            kinds = ["sliding_attention", "full_attention"]
            model = tiny_llama(3, layer_types=kinds, sliding_window=8)
            drafter = RandomDrafter(2)
        return new_sequence(
            model, [9, 4, 11], drafter, rule=rule, depth=3, seed=5, config=config, max_tokens=18
        )

    undisturbed = run(fresh())
    sequence = fresh()
    engine = Engine(16 if kind == "exact" else 64)
    with monkeypatch.context() as patch:
        spots = places(sequence, patch)
        while sequence.finish_reason is None:
            engine._prefill(sequence)
            before = snapshot(sequence)
            spots[place].armed = True
            with pytest.raises(type(spots[place].error)):
                engine.step([sequence])
            assert snapshot(sequence) == before
            check_state(sequence)
            engine.step([sequence])
            check_state(sequence)
    assert sequence.tokens == undisturbed.tokens
    assert sequence.segments == undisturbed.segments
    for name in ("rounds", "tokens", "drafted", "accepted"):
        assert getattr(sequence.stats, name) == getattr(undisturbed.stats, name)


def test_an_interrupted_prefill_goes_on_where_it_was(trunk, head):
    undisturbed = run(
        new_sequence(trunk, PROMPT * 3, MTPDrafter(attach_head(trunk, head)), depth=3, rule="token")
    )
    drafter = MTPDrafter(attach_head(trunk, head))
    sequence = new_sequence(trunk, PROMPT * 3, drafter, depth=3, rule="token")
    family, engine = sequence.state.family, Engine(64)
    family.prefill = Once(family.prefill, KeyboardInterrupt(), after=True)
    family.prefill.armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.step([sequence])
    assert sequence.state.length == 0
    assert all(cache.offset == 0 for cache in sequence.state.caches)
    assert run(sequence).tokens == undisturbed.tokens


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [0, 2])
def test_logits_that_are_not_finite_raise_and_leave_the_state(bad, temperature, row):
    broken = []

    def logits(prefix):
        values = hashed_logits(8)(prefix)
        if broken and len(prefix) == broken[0]:
            values[3] = bad
        return values

    def fresh():
        return new_sequence(
            ExactFamily(logits, 8), [1, 2], RandomDrafter(1), rule="token", depth=3,
            config=sampling(temperature), max_tokens=10,
        )  # fmt: skip

    want = run(fresh()).tokens
    sequence, engine = fresh(), Engine(8)
    engine.step([sequence])
    before = snapshot(sequence)
    broken.append(len(sequence.tokens) + row)
    with pytest.raises(NonFiniteLogitsError) as caught:
        engine.step([sequence])
    assert (caught.value.nan_count or 0) + (caught.value.inf_count or 0) == 1
    assert snapshot(sequence) == before
    check_state(sequence)
    broken.clear()
    assert run(sequence).tokens == want


@pytest.mark.parametrize("token", [-1, 8, 10**6])
def test_a_drafted_id_outside_of_the_vocabulary_never_reaches_the_trunk(token):
    class Wild(RandomDrafter):
        def propose(self, depth, proposal):
            draft = super().propose(depth, proposal)
            return Draft([*draft.tokens[:-1], token], draft.q_rows)

    family = ExactFamily(hashed_logits(8), 8)
    sequence = new_sequence(family, [1, 2], Wild(1), depth=2)
    with pytest.raises(ValueError, match=str(token)):
        Engine(8).step([sequence])
    assert family.rows == []


def test_a_draft_without_its_laws_is_refused():
    class Bare(RandomDrafter):
        def propose(self, depth, proposal):
            return Draft(super().propose(depth, proposal).tokens, [])

    sequence = new_sequence(ExactFamily(hashed_logits(8), 8), [1, 2], Bare(1), depth=2)
    with pytest.raises(ValueError, match="q rows"):
        Engine(8).step([sequence])
    assert sequence.tokens == [1, 2]
    assert sequence.state.length == 1


# --- several sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_sequences_in_one_list_do_not_feel_each_other(trunk, head, rule):
    def fresh():
        drafter = MTPDrafter(attach_head(trunk, head))
        return [
            new_sequence(trunk, PROMPT, drafter, rule=rule, depth=3, seed=1, max_tokens=14),
            new_sequence(
                trunk, [5, 6], NgramDrafter(shortest=1), rule=rule, depth=4, seed=2, max_tokens=5
            ),
            new_sequence(trunk, [7], RandomDrafter(2), rule=rule, depth=2, seed=1, max_tokens=20),
        ]

    alone = [run(sequence) for sequence in fresh()]
    together, engine = fresh(), Engine(64)
    while any(sequence.finish_reason is None for sequence in together):
        engine.step(together)
    assert [s.tokens for s in together] == [s.tokens for s in alone]
    assert [s.stats.rounds for s in together] == [s.stats.rounds for s in alone]


def test_a_finished_sequence_is_left_alone():
    family = ExactFamily(hashed_logits(8), 8)
    sequence = run(new_sequence(family, [1, 2], max_tokens=2))
    before = snapshot(sequence)
    Engine(8).step([sequence])
    assert snapshot(sequence) == before


@pytest.mark.parametrize("spot", ["detokenizer", "observe", "second rollback"])
def test_a_sequence_interrupted_while_committing_is_not_gone_on_with(spot, monkeypatch):
    """Its tokens and its state no longer agree: an error, never wrong tokens."""
    sequence = new_sequence(
        ExactFamily(hashed_logits(16), 16), [9, 4, 11], RandomDrafter(2), rule="coupled", depth=3
    )
    engine = Engine(16)
    engine.step([sequence])
    target, name = {
        "detokenizer": (sequence.output, "add"),
        "observe": (sequence.drafter, "observe"),
        "second rollback": (sequence, "commit"),
    }[spot]
    once = Once(getattr(target, name), KeyboardInterrupt(), after=True)
    once.armed = True
    monkeypatch.setattr(target, name, once)
    with pytest.raises(KeyboardInterrupt):
        engine.step([sequence])
    with pytest.raises(StateError, match="interrupted"):
        engine.step([sequence])
