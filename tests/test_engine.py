"""The round: same output with every drafter, the exact law, stops, interruptions, counters."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from doubles import (
    GREEDY,
    PLAIN,
    BlockDrafter,
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    Spelling,
    check_state,
    hashed_logits,
    new_sequence,
    randomise,
    row_logits,
    run,
    same_or_near_tie,
    scripted_logits,
    text_of,
    tiny_llama,
)
from scipy_free import chi_square_p

from mtplx.drafters import Draft, MTPDrafter, NgramDrafter
from mtplx.engine import Engine
from mtplx.errors import NonFiniteLogitsError
from mtplx.fast_sampling import sparse_distributions_from_mlx_logits
from mtplx.mtp_patch import attach_head, new_head
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits

PROMPT = [9, 4, 31, 9, 4]
RULES = ("token", "coupled")
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
    for seed in range(10):
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
    for seed in range(40):
        config = sampling((0.3, 0.6, 1.0, 1.7)[seed % 4])
        plain = run(new_sequence(family, PROMPT[:2], seed=seed, config=config, max_tokens=15))
        for drafter in (RandomDrafter(seed), NgramDrafter(shortest=1, longest=2)):
            sequence = new_sequence(
                family, PROMPT[:2], drafter, depth=depth, seed=seed, config=config, max_tokens=15
            )
            assert run(sequence).tokens == plain.tokens


@pytest.mark.parametrize("rule", RULES)
def test_greedy_output_is_plain_decodings_under_both_rules(trunk, head, rule):
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
    for seed in range(25):
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
    assert changed > 10, "the penalties must matter for this test to mean anything"


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


# --- the token rule's law -------------------------------------------------------------------------


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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_outputs_law_is_exact(rule, name):
    """Joint law of three tokens (V = 8) over fixed seeds, with drafts that have another law."""
    config, logits, prompt = CONFIGS[name], hashed_logits(8, seed=5), (3, 6)
    family = ExactFamily(logits, 8)
    samples = Counter()
    for seed in range(2500):
        drafter = RandomDrafter(2) if seed % 2 else NgramDrafter(shortest=1, longest=2)
        sequence = new_sequence(
            family, prompt, drafter, rule=rule, depth=3, seed=seed, config=config, max_tokens=3
        )
        engine = Engine(8)
        while sequence.finish_reason is None:
            engine.step([sequence])
        samples[tuple(sequence.token_ids)] += 1
    assert_follows(samples, exact_law(logits, config, prompt, 3))


def test_the_law_with_an_end_of_sequence_inside_blocks():
    logits, prompt = hashed_logits(6, seed=8), (3,)
    family = ExactFamily(logits, 6)
    samples = Counter()
    for seed in range(2500):
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
    for seed in range(1200):
        sequence = new_sequence(
            trunk, [1, 5], MTPDrafter(attach_head(trunk, head)), rule="token", depth=2, seed=seed,
            config=config, max_tokens=3,
        )  # fmt: skip
        engine = Engine(10)
        while sequence.finish_reason is None:
            engine.step([sequence])
        samples[tuple(sequence.token_ids[:2])] += 1
        accepted += sum(sequence.stats.accepted)
    assert accepted > 200
    assert_follows(samples, exact_law(logits, config, (1, 5), 2))


# --- where an output ends -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [0, *DEPTHS])
def test_max_tokens_is_exact(rule, depth):
    family = ExactFamily(scripted_logits(list(range(30)), 2, 40), 40)
    for limit in range(1, 14):
        drafter = KnowingDrafter(2, list(range(30)))
        sequence = new_sequence(family, [35, 36], drafter, rule=rule, depth=depth, max_tokens=limit)
        run(sequence)
        assert sequence.token_ids == list(range(limit))
        assert sequence.finish_reason == "length"
        assert sequence.stats.tokens == limit
        assert sequence.stats.rounds == -(-limit // (depth + 1))


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_ignores_the_depth_does_not_pass_max_tokens(rule):
    class Eager(KnowingDrafter):
        def propose(self, depth, proposal):
            return super().propose(depth + 4, proposal)

    family = ExactFamily(scripted_logits(list(range(30)), 2, 40), 40)
    sequence = new_sequence(
        family, [35, 36], Eager(2, list(range(30))), rule=rule, depth=3, max_tokens=5
    )
    run(sequence)
    assert sequence.token_ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [0, *DEPTHS])
@pytest.mark.parametrize("at", range(8))
def test_end_of_sequence_at_each_offset_of_a_block(rule, depth, at):
    script = [5] * at + [2] + [6] * 12
    family = ExactFamily(scripted_logits(script, 2, 10), 10)
    drafter = KnowingDrafter(2, script)
    sequence = new_sequence(
        family, [7, 8], drafter, rule=rule, depth=depth, eos_ids=[2], max_tokens=20
    )
    run(sequence)
    assert sequence.token_ids == script[: at + 1]
    assert sequence.finish_reason == "stop"
    assert text_of(sequence) == "<5>" * at
    assert sequence.stats.tokens == at + 1
    assert sequence.state.length == 2 + at


def test_no_row_after_an_end_of_sequence_is_run():
    """A draft block ends at its first end-of-sequence token, even if more was drafted."""
    family = ExactFamily(scripted_logits([5, 2, 6, 6, 6, 6], 2, 10), 10)
    drafter = KnowingDrafter(2, [5, 2, 6, 6, 6])
    run(new_sequence(family, [7, 8], drafter, depth=5, eos_ids=[2], max_tokens=20))
    assert family.rows == [3]


@pytest.mark.parametrize("rule", RULES)
def test_a_drafted_end_of_sequence_that_is_refused_does_not_end(rule):
    family = ExactFamily(scripted_logits([5, 6, 7, 8, 1, 1], 2, 10), 10)
    sequence = new_sequence(
        family, [7, 8], BlockDrafter([[5, 2, 7]]), rule=rule, depth=3, eos_ids=[2], max_tokens=6
    )
    run(sequence)
    assert sequence.token_ids == [5, 6, 7, 8, 1, 1]


# "abcdefghij", one letter a token, but token 10 is "xyz" and token 11 nothing.
LETTERS = [*"abcdefghij", "xyz", ""]


def spelled(script, stops, depth, *, rule="coupled", max_tokens=30, eos=(), left="", drafts=None):
    family = ExactFamily(scripted_logits(script, 2, 12), 12)
    drafter = KnowingDrafter(2, script) if drafts is None else BlockDrafter(drafts)
    sequence = new_sequence(
        family, [0, 0], drafter, rule=rule, depth=depth, stops=stops, max_tokens=max_tokens,
        eos_ids=eos, detokenizer=Spelling(LETTERS, left),
    )  # fmt: skip
    return run(sequence)


STOP_CASES = {
    # name: (script, stops, text, kept ids, finish reason)
    "inside a token": ([0, 10, 1], ["y"], "ax", [0, 10], "stop"),
    "a whole token": ([0, 10, 1], ["xyz"], "a", [0], "stop"),
    "across tokens": ([0, 1, 2, 3, 4, 5], ["cde"], "ab", [0, 1], "stop"),
    "from inside a token into the next": ([0, 10, 1, 2], ["zb"], "axy", [0, 10], "stop"),
    "at the very start": ([0, 1, 2], ["ab"], "", [], "stop"),
    "two stops, the earlier in the text": ([0, 1, 2, 3], ["d", "bc"], "a", [0], "stop"),
    "two stops in one token": ([0, 10], ["z", "y"], "ax", [0, 10], "stop"),
    "a beginning that comes to nothing": ([0, 1, 2, 0, 3, 9], ["abd", "bce"], None, None, "length"),
    "a beginning inside a beginning": ([0, 0, 1, 2, 3], ["aabd", "abc"], "a", [0], "stop"),
    "tokens without text between": ([0, 11, 1, 11, 2, 3], ["bc"], "a", [0], "stop"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", STOP_CASES)
def test_stop_strings_cut_text_ids_and_counters_alike(rule, case):
    script, stops, text, kept, reason = STOP_CASES[case]
    if text is None:
        text, kept = "".join(LETTERS[t] for t in script), script
    for depth in range(7):
        sequence = spelled(script, stops, depth, rule=rule, max_tokens=len(script))
        assert text_of(sequence) == text
        assert sequence.token_ids == kept
        assert sequence.finish_reason == reason
        assert sequence.stats.tokens == len(kept)
        assert sum(sequence.stats.accepted) <= max(len(kept), 0)


def test_a_stop_across_draft_blocks():
    for blocks in ([[0], [2], [4]], [[0, 1, 2], [4, 5]], [[0, 1], [3]], [[], [1], [], [4]]):
        sequence = spelled([0, 1, 2, 3, 4, 5], ["bcde"], 3, drafts=blocks)
        assert text_of(sequence) == "a"
        assert sequence.token_ids == [0]
        assert sequence.finish_reason == "stop"


def test_a_stop_that_the_last_token_completes_is_a_stop():
    for depth in range(5):
        sequence = spelled([0, 1, 2, 3], ["cd"], depth, max_tokens=4)
        assert (text_of(sequence), sequence.token_ids) == ("ab", [0, 1])
        assert sequence.finish_reason == "stop"


def test_a_beginning_of_a_stop_is_shown_when_the_output_ends():
    for depth in range(5):
        by_length = spelled([0, 1, 2, 3], ["cdx"], depth, max_tokens=4)
        assert (text_of(by_length), by_length.finish_reason) == ("abcd", "length")
        assert by_length.token_ids == [0, 1, 2, 3]
        by_eos = spelled([0, 1, 2, 3, 9], ["cdx"], depth, eos=[9])
        assert (text_of(by_eos), by_eos.finish_reason) == ("abcd", "stop")
        assert by_eos.token_ids == [0, 1, 2, 3, 9]


def test_a_stop_that_the_flush_completes():
    for depth in range(5):
        sequence = spelled([0, 1, 2, 3], ["d\ufffd"], depth, max_tokens=4, left="\ufffd")
        assert text_of(sequence) == "abc"
        assert sequence.token_ids == [0, 1, 2]
        assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("depth", range(6))
def test_the_earliest_terminator_wins(depth):
    # Stop string and max_tokens by the same token: the stop string ends it.
    assert spelled([0, 1, 2, 3], ["c"], depth, max_tokens=3).finish_reason == "stop"
    # End of sequence and max_tokens by the same token: the end of sequence.
    both = spelled([0, 1, 9, 3], [], depth, max_tokens=3, eos=[9])
    assert (both.finish_reason, both.token_ids) == ("stop", [0, 1, 9])
    # An end of sequence behind a stop string, and the other way round, in one block.
    first = spelled([0, 1, 9, 3], ["b"], depth, eos=[9])
    assert (text_of(first), first.token_ids) == ("a", [0])
    second = spelled([0, 9, 1, 3], ["b"], depth, eos=[9])
    assert (text_of(second), second.token_ids) == ("a", [0, 9])
    # The limit before either.
    third = spelled([0, 1, 9, 3], ["c", "d"], depth, max_tokens=2, eos=[9])
    assert (third.finish_reason, third.token_ids) == ("length", [0, 1])


@pytest.mark.parametrize("depth", DEPTHS)
def test_segments_say_which_characters_were_drafted(depth):
    sequence = spelled([0, 1, 2, 3, 4, 5], [], depth, max_tokens=6, drafts=[[0, 1], [9], [4]])
    flags = "".join(("D" if s.from_draft else "-") * len(s.text) for s in sequence.segments)
    assert text_of(sequence) == "abcdef"
    # depth 1 cuts the first block to one token
    assert flags == {1: "D---D-"}.get(depth, "DD--D-")


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
@pytest.mark.parametrize("kind", ["exact", "mtp", "sliding"])
def test_an_interrupted_round_never_was(rule, place, kind, trunk, head, monkeypatch):
    config = sampling(0.9, presence_penalty=0.5)

    def fresh():
        if kind == "exact":
            drafter, model = RandomDrafter(2), ExactFamily(hashed_logits(16), 16)
        elif kind == "mtp":
            drafter, model = MTPDrafter(attach_head(trunk, head)), trunk
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


# --- counters -------------------------------------------------------------------------------------


def test_counters_by_hand():
    """Script 0..9. Blocks: [0,1] kept whole; [7] refused; none; [5,6,0] two kept; [8,9] cut to 1.

    Emitted: 0 1 2 | 3 | 4 | 5 6 7 | 8 9: ten tokens in five rounds.
    """
    family = ExactFamily(scripted_logits(list(range(12)), 2, 12), 12)
    drafter = BlockDrafter([[0, 1], [7], [], [5, 6, 0], [8, 9]])
    sequence = run(new_sequence(family, [10, 11], drafter, depth=3, max_tokens=10))
    stats = sequence.stats
    assert sequence.token_ids == list(range(10))
    assert drafter.asked == [3, 3, 3, 3, 1]
    assert family.rows == [3, 2, 1, 4, 2]
    assert (stats.prompt_tokens, stats.tokens, stats.rounds) == (2, 10, 5)
    assert stats.drafted == [4, 2, 1]
    assert stats.accepted == [3, 2, 0]
    assert stats.acceptance_length == 2.0
    assert stats.acceptance_by_position == [0.75, 1.0, 0.0]
    assert (stats.drafter, stats.rule, stats.depth) == ("blocks", "coupled", 3)
    assert stats.to_dict()["acceptance_length"] == 2.0


def test_plain_decoding_has_an_acceptance_length_of_one():
    stats = run(new_sequence(ExactFamily(hashed_logits(8), 8), [1], max_tokens=7)).stats
    assert (stats.rounds, stats.tokens, stats.acceptance_length) == (7, 7, 1.0)
    assert stats.drafted == stats.accepted == stats.acceptance_by_position == []


def test_drafts_behind_the_cut_are_not_counted_as_accepted():
    """All five drafts are right, but the output ends with the second."""
    by_stop = spelled([0, 1, 2, 3, 4, 5], ["cd"], 5).stats
    assert (by_stop.tokens, by_stop.drafted, by_stop.accepted) == (2, [1] * 5, [1, 1, 0, 0, 0])
    by_eos = spelled([0, 9, 2, 3, 4, 5], [], 5, eos=[9]).stats
    assert (by_eos.tokens, by_eos.drafted, by_eos.accepted) == (2, [1, 1], [1, 1])


def test_seconds_are_counted():
    stats = run(
        new_sequence(ExactFamily(hashed_logits(8), 8), [1, 2], RandomDrafter(1), depth=2)
    ).stats
    parts = (stats.draft_seconds, stats.forward_seconds, stats.other_seconds)
    assert min(parts) > 0
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds == sum(parts)
    assert stats.tokens_per_second == stats.tokens / stats.decode_seconds
