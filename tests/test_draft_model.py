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
import tiny
from doubles import PLAIN, ExactFamily, hashed_logits
from test_auto import swayed, total_variation  # noqa: F401
from test_law_of_drafts import CONFIGS, PENALTIES, WithHistory, target_law
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import mtplx
from mtplx.certify.cases import depth
from mtplx.certify.enumeration import EXACT, Case
from mtplx.depth import Costs
from mtplx.drafters import AutoDrafter, ModelDrafter, NgramDrafter
from mtplx.drafters.model import SharedVocabulary
from mtplx.errors import ModelError, RequestError
from mtplx.options import Options
from mtplx.sampler_config import SamplerConfig

COLD = SamplerConfig(temperature=0.0, logit_bias={tiny.EOS: -np.inf})
SAMPLINGS = [replace(COLD, temperature=t) for t in (0.0, 0.6, 1.0)]


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
