"""A smaller model as drafter: its law, its state, its vocabulary, and the text it leaves alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import test_cli
import test_law_of_drafts
import test_state
import tiny
from doubles import PLAIN, ExactFamily, check_state, hashed_logits, new_sequence
from test_auto import swayed, total_variation  # noqa: F401
from test_law_of_drafts import CONFIGS, PENALTIES, WithHistory, target_law
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import mtplx
from mtplx.certify.cases import depth
from mtplx.certify.enumeration import EXACT, Case
from mtplx.depth import Costs
from mtplx.drafters import AutoDrafter, ModelDrafter, NgramDrafter, Proposal
from mtplx.drafters.model import SharedVocabulary
from mtplx.engine import Engine
from mtplx.errors import ModelError, NonFiniteLogitsError, RequestError
from mtplx.fast_sampling import sparse_distribution_from_mlx_logits
from mtplx.options import Options
from mtplx.sampler_config import SamplerConfig

COLD = SamplerConfig(temperature=0.0, logit_bias={tiny.EOS: -np.inf})
SAMPLINGS = [replace(COLD, temperature=t) for t in (0.0, 0.6, 1.0)]


def same(vocab):
    names = [str(i) for i in range(vocab)]
    return SharedVocabulary(names, names)


# --- directories ------------------------------------------------------------------------------


LAYERS = 6
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def write(folder, weights, **config):
    """A directory; untied, so that a random model does not say one token again and again."""
    vocab, layers = len(weights[TABLES[0]]), len({n.split(".")[2] for n in weights if ".q_" in n})
    return tiny.write_directory(
        folder, weights=weights, vocab_size=vocab, num_hidden_layers=layers,
        tie_word_embeddings=False, **config,
    )  # fmt: skip


def first_layer(weights):
    """A model of the first layer alone, which often agrees with the whole."""
    return {n: w for n, w in weights.items() if "layers" not in n or ".layers.0." in n}


def resized(weights, vocab):
    """With fewer embeddings, or with more, which are padding."""
    padding = np.zeros((vocab, 64), np.float32)
    return weights | {n: np.concatenate([weights[n], padding])[:vocab] for n in TABLES}


def rearranged(folder, weights, *, drop=(), extra=()):
    """The same model with its ids in another order, some tokens missing and some of its own."""
    names = [name for name in tiny.tiny_vocab() if name not in drop]
    names = [*reversed(names[3:]), *extra, *names[:3]]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [m.split(" ") for m in tiny.MERGES]
    merges = [(a, b) for a, b in merges if {a, b, a + b} <= vocab.keys()]
    text = Tokenizer(models.BPE(vocab, merges))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    text.add_special_tokens([AddedToken(t, special=True) for t in tiny.SPECIAL])
    old = {name: i for i, name in enumerate(tiny.tiny_vocab())}
    places = [old.get(name, 0) for name in names]
    changed = weights | {n: weights[n][places] for n in TABLES}
    write(folder, changed, bos_token_id=len(names) - 2, eos_token_id=len(names) - 1)
    text.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def weights():
    """Six layers, of which all but the first say little."""
    config = tiny.tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    found = tiny.tiny_weights(config)
    quiet = [n for n in found if ".layers." in n and ("o_proj" in n or "down_proj" in n)]
    return found | {n: 0.2 * found[n] for n in quiet if ".layers.0." not in n}


@pytest.fixture(scope="module")
def trunk_folder(tmp_path_factory, weights):
    return write(tmp_path_factory.mktemp("trunk"), weights)


@pytest.fixture(scope="module")
def bundle(trunk_folder):
    return mtplx.load(trunk_folder, weights="float32")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory, weights):
    return write(tmp_path_factory.mktemp("small"), first_layer(weights))


@pytest.fixture(scope="module")
def small(small_folder):
    return mtplx.load(small_folder, weights="float32")


def texts(bundle, small, sampling, seed=1, tokens=24, **how):
    """(output of plain decoding, output with the draft model)."""
    common = {"sampling": sampling, "seed": seed, "max_tokens": tokens, "chat": False}
    plain = mtplx.generate(bundle, "the and on", draft="none", **common)
    return plain, mtplx.generate(
        bundle, "the and on", **({"draft": "model", "draft_model": small} | how), **common
    )


# --- the text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"depth": 3}, {"depth": 1}, {}, {"draft": "auto"}])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}")
def test_the_text_is_plain_decodings(bundle, small, sampling, how):
    counts = Counter()
    for seed in range(3):
        plain, drafted = texts(bundle, small, sampling, seed, **how)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.drafter == how.get("draft", "model")
        counts["drafted"] += sum(drafted.stats.drafted)
        counts["kept"] += sum(drafted.stats.accepted)
    assert 0 < counts["kept"] < counts["drafted"]


@pytest.mark.parametrize("verify", ["token", "block"])
def test_greedy_text_under_every_rule_and_all_kept_of_the_model_itself(bundle, verify):
    plain, drafted = texts(bundle, bundle, COLD, depth=4, verify=verify)
    assert drafted.token_ids == plain.token_ids
    # The trunk's padding has no spelling, but of two models alike every id is one.
    assert drafted.stats.accepted == drafted.stats.drafted


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_at_a_temperature_the_model_itself_is_kept_too(bundle, rule):
    _, drafted = texts(bundle, bundle, SAMPLINGS[2], depth=3, verify=rule)
    assert drafted.stats.acceptance_by_position[0] > 0.95


def test_a_seed_repeats_depths_and_the_costs_are_told(bundle, small):
    one, two = (
        texts(bundle, small, SAMPLINGS[1], tokens=40, verify="token")[1].stats for _ in range(2)
    )
    assert (one.drafted, one.accepted, one.sources) == (two.drafted, two.accepted, two.sources)
    tables, layer = 2 * 320 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    share = (tables + layer + 64) / (tables + LAYERS * layer + 64)
    assert one.costs["draft"] == pytest.approx(share, abs=1e-4)
    assert (one.costs["start"], one.costs["draft_from"]) == (0.0, "bytes")
    json.dumps(one.to_dict())


def test_a_draft_that_costs_as_much_as_the_trunk_is_left(bundle):
    stats = texts(bundle, bundle, SAMPLINGS[2], tokens=40)[1].stats
    assert stats.costs["draft"] == 1.0
    assert stats.sources["none"]["rounds"] >= stats.rounds - 1, "but for a probe"


# --- the law ----------------------------------------------------------------------------------

PROMPT = test_law_of_drafts.PROMPT
# Shared are "a" and "c", in the other order; "b" is the trunk's alone, "x" the draft model's.
MAPPED = {vocab: SharedVocabulary("abcd"[:vocab], "cxa") for vocab in (3, 4)}
NAMES = {vocab: SharedVocabulary("abcd"[:vocab], "abcd"[:vocab]) for vocab in (3, 4)}


def in_eighths(vocab):
    logits = hashed_logits(vocab, seed=3, order=1)
    return lambda prefix: np.round(8 * logits(prefix)) / 8


def played(monkeypatch, rule, config, shared, vocab, depths, wrap=lambda drafter: drafter):
    """(TV, {(source, depth)}) of one round of each depth, as in ``test_law_of_drafts``."""
    own, rounds = 3 if shared is MAPPED[vocab] else vocab, len(depths)

    @cache
    def p(history):
        counts = Counter(history[len(PROMPT) :])
        return target_law(config, vocab, history[-2:], tuple(sorted(counts.items())))

    def fresh():
        drafter = ModelDrafter(ExactFamily(in_eighths(own), own), shared)
        return WithHistory(wrap(drafter), config, depths)

    case = Case(p, None, depth(0), vocab, rounds=rounds, longest=sum(depths) + rounds)
    return total_variation(monkeypatch, rule, case, fresh, PROMPT)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("rule", "vocab"), [("token", 4), ("block", 4), ("coupled", 3)])
@pytest.mark.parametrize("vocabularies", [MAPPED, NAMES], ids=["mapped", "same"])
def test_the_joint_law_is_the_product_of_p(rule, vocab, vocabularies, config, monkeypatch):
    depths = (2, 1) if vocabularies is MAPPED else (1, 1)
    apart, seen = played(monkeypatch, rule, config, vocabularies[vocab], vocab, depths)
    assert apart <= EXACT
    assert set(seen) == {("model", k) for k in depths}


@pytest.mark.parametrize(("rule", "vocab"), [("token", 4), ("block", 4), ("coupled", 3)])
@pytest.mark.usefixtures("swayed")
def test_the_joint_law_with_an_adaptive_depth_and_copies(rule, vocab, monkeypatch):
    def wrap(drafter):
        copies = NgramDrafter(shortest=1, longest=2)
        return AutoDrafter(drafter, copies, Costs((1.0, 1.1, 1.2, 1.3), 0.05))

    apart, seen = played(monkeypatch, rule, PENALTIES, MAPPED[vocab], vocab, (2, 2), wrap)
    assert apart <= EXACT
    assert {source for source, k in seen if k} == {"model", "ngram"}


def test_nothing_is_drafted_where_every_shared_token_is_banned(monkeypatch):
    config = replace(PLAIN, logit_bias={0: -np.inf, 2: -np.inf})
    apart, seen = played(monkeypatch, "token", config, MAPPED[4], 4, (2, 2))
    assert (apart <= EXACT, set(seen)) == (True, {("model", 0)})


# --- its state --------------------------------------------------------------------------------


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
    events = []

    def draw(offset, q):
        events.append(("draw", offset))
        return int(np.argsort(-q.probs)[offset])

    def more(confidences):
        events.append(("more", list(confidences)))
        return len(confidences) < stop

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


# --- vocabularies -----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [271, 300, 400])
def test_padding_may_differ(bundle, weights, vocab, tmp_path):
    folder = write(tmp_path, resized(first_layer(weights), vocab))
    padded, seen, drafted_ids = mtplx.load(folder, weights="float32"), Counter(), set()
    for sampling in SAMPLINGS:
        plain, drafted = texts(bundle, padded, sampling, depth=3, tokens=40)
        assert drafted.token_ids == plain.token_ids
        seen["kept"] += drafted.stats.accepted[0]
        seen["padding"] += sum(token >= 271 for token in plain.token_ids)
        stream = mtplx.api.start(
            bundle,
            "the",
            Options(sampling, 20, draft="model", draft_model=padded, depth=3, seed=2),
            lambda done: drafted_ids.update(done.draft.tokens),
        )
        stream.result()
    assert seen["kept"] > 0
    assert seen["padding"] > 0, "the trunk says ids that the draft model does not have"
    assert drafted_ids
    assert max(drafted_ids) < 271


def test_ids_in_another_order_are_the_same_tokens(tmp_path, weights):
    """A rearranged copy of the trunk agrees with it in everything: all its drafts are kept."""
    plain_folder = write(tmp_path / "a", resized(weights, 271))
    trunk, other = (
        mtplx.load(f, weights="float32")
        for f in (plain_folder, rearranged(tmp_path / "b", resized(weights, 271)))
    )
    plain, drafted = texts(trunk, other, COLD, depth=3)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted == drafted.stats.accepted


def test_tokens_that_only_one_has_are_never_drafted(tmp_path, bundle, weights):
    dropped = ("Ġthe", "x", "Ġand")
    folder = rearranged(tmp_path, resized(weights, 271), drop=dropped, extra=("Ġtheon", "xx"))
    other, drafted_ids = mtplx.load(folder, weights="float32"), set()
    for sampling in SAMPLINGS:
        plain, drafted = texts(bundle, other, sampling, depth=3)
        assert drafted.token_ids == plain.token_ids
        options = Options(sampling, 30, draft="model", draft_model=other, depth=3, seed=2)
        note = lambda done: drafted_ids.update(done.draft.tokens)  # noqa: E731
        mtplx.api.start(bundle, "the and x", options, note).result()
    spelled = {bundle.tokenizer.token_text(token) for token in drafted_ids}
    assert len(spelled) > 5
    assert not spelled & {*dropped, ""}


def test_a_token_is_spelled_by_the_longest_of_the_draft_models():
    names = ["a", "b", "c", "ab", "abc", "d", "Zabd", ""]
    shared = SharedVocabulary(names, ["d", "ab", "c", "a", "abc"])
    assert [shared.own(i) for i in range(len(names))] == [
        [3], [], [2], [1], [4], [0], [1, 0], [],
    ]  # fmt: skip
    assert list(shared.vocabulary.ids) == [0, 2, 3, 4, 5]
    row = mx.array([[0.0, 1.0, 2.0, 3.0, 4.0]])
    assert np.asarray(shared.logits(row)).tolist() == [[3.0, 2.0, 1.0, 4.0, 0.0]]


def test_another_vocabulary_is_refused_in_words():
    theirs = [f"Ġ{word}" for word in "abcdefgh"] + ["x"]
    ours = [f"▁{word}" for word in "abcdefgh"] + ["x"]
    with pytest.raises(
        ModelError, match=r"of its 9 tokens 1 are among the trunk's 9.*id 0.*▁a.*Ġa"
    ):
        SharedVocabulary(theirs, ours)
    with pytest.raises(ModelError, match="0 are among"):
        SharedVocabulary(["a"], ["b"])
    SharedVocabulary([*"abcdefgh"], [*"abcd", *"wxyz"])
    with pytest.raises(ModelError):
        SharedVocabulary([*"abcdefgh"], [*"abc", *"vwxyz"])


# --- options and the command ------------------------------------------------------------------


def test_what_does_not_fit_together_is_refused(bundle, small):
    with pytest.raises(RequestError, match="needs a draft_model"):
        Options(draft="model")
    for draft in ("mtp", "ngram", "none"):
        with pytest.raises(RequestError, match=draft):
            Options(draft=draft, draft_model=small)
    with pytest.raises(RequestError, match=r"mtplx\.load.*'a path'"):
        mtplx.stream(bundle, [5], draft="model", draft_model="a path")
    assert "trunk" not in repr(Options(draft="model", draft_model=small))


def test_the_command_drafts_with_it(trunk_folder, small_folder, tmp_path, weights):
    names, foreign = tiny.tiny_vocab(), [f"foreign {i}" for i in range(200)]
    common = ["generate", "the and", "-m", str(trunk_folder), "--seed", "3", "-n", "12", "--json"]
    plain = json.loads(test_cli.run(*common, "--draft", "none").stdout)
    model = ["--draft-model", str(small_folder), "--depth", "2"]
    found = test_cli.run(*common, "--draft", "model", *model)
    assert found.returncode == 0, found.stderr.decode()
    told = json.loads(found.stdout)
    assert told["token_ids"] == plain["token_ids"]
    assert told["stats"]["drafter"] == "model"
    assert told["stats"]["sources"]["model"]["rounds"] > 0
    test_cli.fails(test_cli.run(*common, "--draft", "model"), 2, "draft_model")
    test_cli.fails(test_cli.run(*common, "--draft", "ngram", *model), 2, "draft_model", "ngram")
    other = rearranged(tmp_path, resized(weights, 271), drop=names[3:200], extra=foreign)
    refused = test_cli.run(*common, "--draft", "model", "--draft-model", str(other))
    test_cli.fails(refused, 1, "vocabulary", "271")
