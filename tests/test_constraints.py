"""min_tokens, banned ids and grammars at every position of a block: law, equality with AR, ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from doubles import (
    GREEDY,
    PLAIN,
    WRONG,
    BlockDrafter,
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    Remembering,
    hashed_logits,
    new_sequence,
    run,
    scripted_logits,
)

from mtplx.certify.cases import markov
from mtplx.certify.enumeration import EXACT, FLIPS, Case, product_law, total_variation
from mtplx.certify.forking import play_all
from mtplx.distribution import SparseDistribution
from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.drafters import Draft, NgramDrafter
from mtplx.engine import Engine
from mtplx.errors import NonFiniteLogitsError
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits
from mtplx.sequence import History
from mtplx.verify import RULES, verify

EOS = 2
ALL_BUT_EOS = [*range(EOS), *range(EOS + 1, 24)]


class Alternating:
    """A toy grammar over any vocabulary: never twice ``once`` in a row, EOS only after a 0."""

    name = "toy"

    def __init__(self, vocab, once=1, eos=EOS):
        self.vocab, self.once, self.eos, self.last = vocab, once, eos, None

    def advance(self, token):
        assert self._after(self.last)[token]
        self.last = token

    def mask(self, drafts):
        last = self.last
        for token in drafts:
            if not self._after(last)[token]:
                return None
            last = token
        return self._after(last)

    def _after(self, last):
        mask = np.ones(self.vocab, bool)
        mask[self.eos] = last == 0
        if last == self.once:
            mask[self.once] = False
        return mask


# --- the joint law ----------------------------------------------------------------------------


def constrained(seed, *, grammar, min_tokens, **parameters):
    """(p, stop): the shipped law of three tokens, and whether drafts end here."""
    logits = np.random.default_rng(seed).normal(0, 1, (4, 3)).astype(np.float32)
    config = SamplerConfig(**{"temperature": 0.8, "top_p": 1.0, "top_k": 0, **parameters})

    def split(tokens):
        """The history of the allowed part, and the rest as drafts: at least the last token."""
        history = History(
            config, (), eos_ids=[EOS], min_tokens=min_tokens,
            grammar=Alternating(3) if grammar else None,
        )  # fmt: skip
        known = 0
        for token in tokens[:-1]:
            mask = history.constraints.mask([], 3)
            if mask is not None and not mask[token]:
                break
            history.append(token)
            known += 1
        return history, tokens[known:]

    @cache
    def p(tokens):
        history, drafts = split(tokens)
        ends = range(len(tokens) - len(drafts), len(tokens) + 1)
        rows = [logits[tokens[end - 1] if end else 3] for end in ends]
        return history.laws(mx.array(np.array(rows)), drafts)[-1]

    def depth(most):
        def how_deep(history, drafts):
            before, rest = split((*history, *drafts))
            for i, token in enumerate(rest):
                mask = before.constraints.mask(rest[:i], 3)
                if mask is not None and not mask[token]:
                    return len(drafts)  # what is not allowed ends the block
            return most

        return how_deep

    return p, depth


LAWS = {
    "min_tokens": {"grammar": False, "min_tokens": 3},
    "grammar": {"grammar": True, "min_tokens": 0},
    "grammar, min_tokens, penalties": {
        "grammar": True, "min_tokens": 2, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    },
    "grammar, min_p, bias": {
        "grammar": True, "min_tokens": 1, "min_p": 0.2, "logit_bias": {1: 0.5},
    },
    "banned": {"grammar": False, "min_tokens": 2, "banned_ids": [1]},
}  # fmt: skip


@pytest.mark.parametrize("masked", [True, False], ids=["masked drafts", "unmasked drafts"])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_is_the_product_of_p(rule, law, masked):
    p, depth = constrained(70, **law)
    q = constrained(71, **law)[0] if masked else markov(3, 72, sparse=True)
    case = Case(p, q, depth(2), 3, eos=(EOS,), longest=5)
    assert total_variation(rule, case) <= EXACT


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_mask_on_the_first_row_only_is_caught(rule, monkeypatch):
    p, depth = constrained(70, grammar=True, min_tokens=2)
    free, _ = constrained(70, grammar=False, min_tokens=0)
    case = Case(p, markov(3, 72, sparse=True), depth(2), 3, eos=(EOS,), rounds=1, longest=3)

    def first_only(history):
        return p(history) if not history else free(history)

    assert total_variation(rule, replace(case, p=p)) <= EXACT
    played = replace(case, p=first_only)
    # The play follows the wrong law; held against the right one.
    monkeypatch.setattr("mtplx.certify.enumeration.product_law", exact_from(p))
    assert total_variation(rule, played) > WRONG


def exact_from(p):
    return lambda case, prefix, length: product_law(replace(case, p=p), prefix, length)


# --- the joint law of the running engine --------------------------------------------------------


class Unmasked(Remembering):
    """Draws from a fixed law that knows of no mask."""

    name = "unmasked"

    def propose(self, depth, proposal):
        q = SparseDistribution(np.arange(3), np.array([0.2, 0.5, 0.3]), 3)
        return Draft([proposal.draw(i, q) for i in range(depth)], [q] * depth)


DRAFTERS = {
    "masked": lambda: RandomDrafter(1),
    "unmasked": Unmasked,
    "copies that are not allowed": lambda: KnowingDrafter(3, [1, 1, 2, 2, 0]),
    "copies that end": lambda: KnowingDrafter(3, [0, 2, 0, 2, 0]),
}


@pytest.mark.parametrize("new", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_of_the_engine_is_the_product_of_p(rule, new, monkeypatch):
    """Every outcome of the engine's own draws, up to four tokens."""
    table, prompt = hashed_logits(3, seed=4, scale=1.0), (0, 1, 0)

    def logits(prefix):
        return table(prefix).astype(np.float32).astype(np.float64)

    def p(output):
        if len(output) == 4:
            return SparseDistribution.one_hot(EOS, 3)
        mask = Alternating(3)
        for token in output:
            mask.advance(token)
        allowed = mask.mask([])
        allowed[EOS] &= len(output) >= 2
        row = np.where(allowed, logits((*prompt, *output)), -np.inf)
        return distribution_from_logits(row, PLAIN)

    def play(noise):
        def judged(rule, p_rows, q_rows, draft, draws, **how):
            noise.flips = FLIPS[rule](p_rows, q_rows, draft)
            return verify(rule, p_rows, q_rows, draft, draws, **how)

        monkeypatch.setattr("mtplx.engine.verify", judged)
        sequence = new_sequence(
            ExactFamily(logits, 3), prompt, new(), rule=rule, depth=3, max_tokens=4, eos_ids=[EOS],
            min_tokens=2, grammar=Alternating(3),
        )  # fmt: skip
        while sequence.finish_reason is None:
            Engine(3).step([sequence])
        drafted.append(sum(sequence.stats.drafted))
        return tuple(sequence.token_ids)

    drafted, played = [], Counter()
    for weight, output in play_all(play):
        played[output] += weight
    exact = product_law(Case(p, None, None, 3, eos=(EOS,)), (), 4)
    apart = sum(abs(played[o] - exact.get(o, 0.0)) for o in played.keys() | exact.keys()) / 2
    assert apart <= EXACT
    assert max(drafted) > 0


# --- the engine: AR's own output under the coupled rule ---------------------------------------


def sequence_of(seed, drafter=None, *, vocab=24, config=PLAIN, **how):
    family = ExactFamily(hashed_logits(vocab, seed=seed, scale=2.0), vocab)
    return new_sequence(family, [5, 6, 5], drafter, seed=seed, config=config, **how)


CONSTRAINED = {
    "min_tokens": {"eos_ids": [1, 2, 3, 4], "min_tokens": 9},
    "grammar": {"eos_ids": [EOS], "grammar": True},
    "both, greedy": {"eos_ids": [EOS], "grammar": True, "min_tokens": 6, "config": GREEDY},
    "banned": {"config": SamplerConfig(temperature=1.2, banned_ids=[3, 4, 5, 6, 7, 8])},
    "everything": {
        "eos_ids": [EOS, 9], "grammar": True, "min_tokens": 4,
        "config": SamplerConfig(
            0.9, 0.95, 0, 0.5, 0.3, 0.02, 1.3, {4: 1.5, 7: -np.inf}, banned_ids=[11, 12]
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("how", CONSTRAINED.values(), ids=CONSTRAINED)
def test_with_drafts_the_output_is_plain_decodings(how):
    changed = 0

    def fresh(seed, drafter=None, depth=0, *, free=False):
        given = dict(how)
        if given.pop("grammar", False) and not free:
            given["grammar"] = Alternating(24, once=5)
        if free:
            given = {"eos_ids": given.get("eos_ids", ()), "config": PLAIN}
        return run(sequence_of(seed, drafter, depth=depth, max_tokens=16, **given))

    for seed in range(6):
        plain = fresh(seed)
        output = plain.tokens[3:]
        changed += output != fresh(seed, free=True).tokens[3:]
        assert all(t not in plain.eos_ids for t in output[: how.get("min_tokens", 0)])
        for depth, drafter in enumerate((
            RandomDrafter(seed), KnowingDrafter(3, output), KnowingDrafter(3, output, shift=1),
            NgramDrafter(shortest=1), BlockDrafter([[5, 5, 5, EOS]] * 20),
        ), 1):  # fmt: skip
            assert fresh(seed, drafter, depth).tokens == plain.tokens
    assert changed


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_keeps_to_the_constraints(rule):
    for seed in range(12):
        grammar = Alternating(24, once=5)
        sequence = run(
            sequence_of(
                seed, RandomDrafter(seed), rule=rule, depth=4, max_tokens=20, eos_ids=[EOS, 7],
                min_tokens=5, grammar=Both(grammar, 7),
                config=SamplerConfig(temperature=1.5, banned_ids=range(10, 20)),
            )
        )  # fmt: skip
        output = sequence.token_ids
        assert not set(output) & set(range(10, 20))
        assert not set(output[:5]) & {EOS, 7}
        for before, token in zip([None, *output], output, strict=False):
            assert not before == token == 5
            assert token not in (EOS, 7) or before == 0


class Both:
    """A grammar whose second end of sequence is allowed where the first is."""

    name = "toy"

    def __init__(self, inner, second):
        self.inner, self.second, self.advance = inner, second, inner.advance

    def mask(self, drafts):
        mask = self.inner.mask(drafts)
        if mask is not None:
            mask[self.second] = mask[self.inner.eos]
        return mask


def test_drafts_are_drawn_under_the_mask_with_a_reduced_vocabulary_too():
    vocabulary = DraftVocabulary([1, 5, 7], 24)
    history = History(PLAIN, (), eos_ids=[1], grammar=Alternating(24, once=5, eos=1))
    logits = mx.array([9.0, 0.0, 0.0])
    assert history.draft_law(logits, [], vocabulary).token_ids.tolist() == [5, 7]
    assert history.draft_law(logits, [5], vocabulary).token_ids.tolist() == [7]
    assert history.draft_law(logits, [0], vocabulary).token_ids.tolist() == [1, 5, 7]
    assert history.draft_law(logits, [5, 5], vocabulary).token_ids.tolist() == [1, 5, 7]
    only = DraftVocabulary([5], 24)
    assert history.draft_law(mx.array([9.0]), [5], only) is None


# --- where no token is left ---------------------------------------------------------------------


class Nothing(Alternating):
    """Allows nothing after the token ``once``."""

    def _after(self, last):
        return super()._after(last) & (last != self.once)


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"config": replace(PLAIN, banned_ids=range(24))}, ["banned_ids", "position 0"]),
        ({"config": replace(GREEDY, banned_ids=range(24))}, ["banned_ids"]),
        ({"config": replace(PLAIN, logit_bias=dict.fromkeys(range(24), -np.inf))}, ["logit_bias"]),
        ({"grammar": Alternating(24), "config": replace(PLAIN, banned_ids=ALL_BUT_EOS)},
         ["toy", "banned_ids"]),
        ({"min_tokens": 1, "config": replace(PLAIN, banned_ids=ALL_BUT_EOS)},
         ["min_tokens", "banned_ids"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rule", sorted(RULES))
def test_it_is_an_error_that_names_the_constraints(rule, how, names):
    sequence = sequence_of(1, BlockDrafter([[3, 4]] * 3), rule=rule, depth=2, eos_ids=[EOS], **how)
    for _ in range(2):  # a second try finds the sequence as it was
        with pytest.raises(NonFiniteLogitsError) as caught:
            Engine(24).step([sequence])
        assert all(name in str(caught.value) for name in names), caught.value
        assert sequence.tokens == [5, 6, 5]
        assert sequence.error is caught.value


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_dead_end_behind_a_rejected_draft_is_none(rule):
    """p never gives 1, after which nothing could come: drafting it changes nothing."""
    family = ExactFamily(scripted_logits([3, 4, 0, EOS], 1, 8), 8)
    for blocks in ([[1, 3, 3]], [[3, 1, 3]], [[3, 4, 1, 3]]):
        sequence = new_sequence(
            family, [5], BlockDrafter(blocks), rule=rule, depth=4, eos_ids=[EOS],
            grammar=Nothing(8), config=replace(PLAIN, temperature=0.1),
        )  # fmt: skip
        assert run(sequence).token_ids == [3, 4, 0, EOS]
        assert sequence.stats.drafted[:1] in ([1], [])


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_dead_end_behind_an_accepted_draft_is_an_error(rule):
    sequence = new_sequence(
        ExactFamily(scripted_logits([3, 1, 0], 1, 8), 8), [5], BlockDrafter([[3, 1, 3]]),
        rule=rule, depth=3, eos_ids=[EOS], grammar=Nothing(8), config=GREEDY,
    )  # fmt: skip
    with pytest.raises(NonFiniteLogitsError, match=r"toy.*position 2"):
        Engine(8).step([sequence])
    assert sequence.tokens == [5]


def test_constraints_are_not_run_ahead_of():
    """Greedy decoding on the device would not know of the mask."""
    sequence = sequence_of(3, config=GREEDY, eos_ids=[EOS], min_tokens=2)
    assert sequence.history.greedy_on_device(mx.zeros((1, 24))) is None
    for _ in range(2):
        Engine(24).step([sequence])
    assert sequence.history.greedy_on_device(mx.zeros((1, 24))) is not None
