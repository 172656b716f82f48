"""``generate`` and ``stream``: what is refused, and that a stream and a result are one text."""

from __future__ import annotations

import dataclasses

import heads
import numpy as np
import pytest
from doubles import GREEDY, ExactFamily, KnowingDrafter, new_sequence, randomise, scripted_logits
from tiny import EOS, tiny_tokenizer, write_directory

import mtplx
from mtplx.api import Stream, vocab_size
from mtplx.drafters import NgramDrafter
from mtplx.errors import MtplxError, RequestError
from mtplx.mtp_patch import new_head
from mtplx.options import Options
from mtplx.sampler_config import SamplerConfig
from mtplx.tokenizer import Tokenizer

HOT = SamplerConfig(temperature=1.0, top_p=1.0, top_k=50)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = write_directory(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)
    bundle = mtplx.load(path)
    head = new_head(bundle.trunk)
    randomise(head, 1)
    return dataclasses.replace(bundle, head=head)


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sampling", {"temperature": 1.0}),
        ("sampling", None),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("max_tokens", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("seed", False),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", b"a"),
        ("stop", None),
        ("stop", 7),
        ("draft", "eagle"),
        ("draft", None),
        ("depth", -1),
        ("depth", 65),
        ("depth", "3"),
        ("depth", None),
        ("depth", True),
        ("verify", "block?"),
        ("verify", 1),
        ("chat", None),
        ("chat", "no"),
    ],
)
def test_a_bad_option_is_refused_by_name(bundle, field, value):
    with pytest.raises(RequestError, match=rf"^{field} must be"):
        mtplx.generate(bundle, "a", **{field: value})
    with pytest.raises(ValueError, match=field):
        Options(**{field: value})


def test_an_unknown_option_is_a_type_error(bundle):
    with pytest.raises(TypeError, match="temperature"):
        mtplx.generate(bundle, "a", temperature=0.5)


def test_stops_may_come_from_any_iterable():
    assert Options(stop="ab").stop == ("ab",)
    assert tuple(Options(stop=["a", "b"]).stop) == ("a", "b")
    assert tuple(Options(stop=(s for s in "ab")).stop) == ("a", "b")


def test_options_do_not_follow_a_list_that_changes_later():
    stops = ["a"]
    options = Options(stop=stops)
    stops.append("")
    assert tuple(options.stop) == ("a",)


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([-1], "-1"),
        ([5, 320], "320"),
        ([5, 1.0], "1.0"),
        ([True], "True"),
        (["a"], "'a'"),
        ([5, {"role": "user", "content": "a"}], "token id"),
        ([5] * 64, "context"),
        ([5] * 65, "65 tokens.*64"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_before_anything_runs(bundle, prompt, message):
    with pytest.raises(RequestError, match=message):
        mtplx.stream(bundle, prompt)


def test_an_empty_string_without_a_template_is_an_empty_prompt(bundle):
    with pytest.raises(RequestError, match="empty"):
        mtplx.generate(bundle, "", chat=False)


def test_the_context_bounds_the_output(bundle):
    for room in (1, 2, 5):
        sampling = SamplerConfig(temperature=1.0, logit_bias={EOS: -1e9})
        result = mtplx.generate(bundle, [5] * (64 - room), sampling=sampling, seed=1, depth=4)
        assert len(result.token_ids) == room
        assert result.finish_reason == "length"


def test_the_three_forms_of_a_prompt_agree(bundle):
    tokenizer = bundle.tokenizer
    message = [{"role": "user", "content": "the"}]
    chat = mtplx.generate(bundle, "the", seed=1, max_tokens=5)
    assert chat.token_ids == mtplx.generate(bundle, message, seed=1, max_tokens=5).token_ids
    ids = tokenizer.apply_chat_template(message)
    assert chat.token_ids == mtplx.generate(bundle, ids, seed=1, max_tokens=5).token_ids
    raw = mtplx.generate(bundle, "the", chat=False, seed=1, max_tokens=5)
    ids = tokenizer.encode("the")
    assert raw.token_ids == mtplx.generate(bundle, ids, seed=1, max_tokens=5).token_ids


def test_mtp_needs_a_head(bundle):
    bare = dataclasses.replace(bundle, head=None)
    with pytest.raises(RequestError, match="head"):
        mtplx.stream(bare, [5], draft="mtp")
    assert mtplx.generate(bare, [5], max_tokens=2).stats.drafter == "ngram"
    assert mtplx.generate(bare, [5], max_tokens=2, depth=3).stats.drafter == "ngram"
    assert mtplx.generate(bundle, [5], max_tokens=2).stats.drafter == "auto"
    fixed = mtplx.generate(bundle, [5, 6], max_tokens=3, depth=1).stats
    assert (fixed.drafter, fixed.depth, list(fixed.sources)) == ("mtp", 1, ["mtp", "none"])
    none = mtplx.generate(bundle, [5], max_tokens=2, draft="none").stats
    assert (none.drafter, none.depth) == ("none", 0)
    assert none.sources == {"none": {"rounds": 2, "emitted": 2}}


def test_a_configuration_nested_under_text_config_is_understood(bundle):
    inner = {"vocab_size": 320, "max_position_embeddings": 8}
    provenance = dataclasses.replace(bundle.provenance, config={"text_config": inner})
    nested = dataclasses.replace(bundle, provenance=provenance)
    assert vocab_size(nested) == 320
    with pytest.raises(RequestError, match="context 8"):
        mtplx.stream(nested, [5] * 8)


# --- seeds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["mtp", "ngram", "none"])
def test_without_a_seed_one_is_drawn_and_reproduces_the_output(bundle, draft):
    first = mtplx.generate(bundle, [5, 6], sampling=HOT, max_tokens=10, draft=draft)
    assert 0 <= first.seed < 2**53
    again = mtplx.generate(
        bundle, [5, 6], sampling=HOT, max_tokens=10, draft=draft, seed=first.seed,
        verify=first.stats.rule,
    )  # fmt: skip
    assert again.token_ids == first.token_ids
    other = mtplx.generate(bundle, [5, 6], sampling=HOT, max_tokens=10, draft=draft)
    assert other.seed != first.seed


def test_a_seed_gives_one_text_whatever_drafts(bundle):
    texts = {
        mtplx.generate(
            bundle, [5, 6], sampling=HOT, max_tokens=20, draft=draft, depth=depth, seed=4
        ).text
        for draft, depth in (("none", 0), ("mtp", 1), ("mtp", 4), ("ngram", 5), ("auto", 2))
    }
    texts |= {
        mtplx.generate(bundle, [5, 6], sampling=HOT, max_tokens=20, draft=draft, seed=4).text
        for draft in ("auto", "mtp", "ngram")
    }
    assert len(texts) == 1


def test_a_head_gets_the_layers_it_reads(bundle):
    reading = dataclasses.replace(bundle, head=heads.random_head(bundle, levels=(1,)))
    options = {"sampling": HOT, "max_tokens": 12, "seed": 2}
    text = mtplx.generate(bundle, [5, 6], draft="none", **options).text
    for draft, depth in (("mtp", 3), ("auto", "auto"), ("ngram", 3)):
        assert mtplx.generate(reading, [5, 6], draft=draft, depth=depth, **options).text == text


# --- streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("a",), ("\ufffd",), ("the", "an", "\n")])
@pytest.mark.parametrize("verify", ["token", "coupled"])
@pytest.mark.parametrize("draft", ["mtp", "ngram"])
def test_streamed_text_is_the_text_of_the_result(bundle, stop, verify, draft):
    for seed in range(3):
        options = {
            "sampling": HOT, "max_tokens": 25, "seed": seed, "stop": stop, "verify": verify,
            "draft": draft, "depth": 4,
        }  # fmt: skip
        result = mtplx.generate(bundle, [5, 6, 5], **options)
        chunks = list(mtplx.stream(bundle, [5, 6, 5], **options))
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == result.finish_reason
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert ids[: len(result.token_ids)] == result.token_ids
        assert all(s not in result.text for s in stop)
        decoded = bundle.tokenizer.decode(result.token_ids)
        assert decoded.startswith(result.text) if stop else decoded == result.text
        assert result.stats.tokens == len(result.token_ids)


def test_a_result_after_some_chunks_is_the_whole_result(bundle):
    options = {"sampling": HOT, "max_tokens": 20, "seed": 3, "depth": 2}
    whole = mtplx.generate(bundle, [5, 6], **options)
    stream = mtplx.stream(bundle, [5, 6], **options)
    next(iter(stream))
    next(iter(stream))
    assert stream.result().text == whole.text
    assert stream.result().token_ids == whole.token_ids
    assert list(stream) == []


def test_an_abandoned_stream_leaves_the_next_one_alone(bundle):
    options = {"sampling": HOT, "max_tokens": 20, "seed": 3, "depth": 3, "verify": "token"}
    alone = mtplx.generate(bundle, [5, 6], **options)
    for taken in range(4):
        abandoned = iter(mtplx.stream(bundle, [7, 8, 9], sampling=HOT, seed=9, depth=5))
        for _ in range(taken):
            next(abandoned)
        abandoned.close()
        del abandoned
        assert mtplx.generate(bundle, [5, 6], **options).token_ids == alone.token_ids


def test_streams_that_take_turns_are_each_as_alone(bundle):
    options = [
        {"sampling": HOT, "max_tokens": 12, "seed": 1, "depth": 3, "verify": "token"},
        {"sampling": GREEDY, "max_tokens": 15, "seed": 2, "depth": 2, "draft": "ngram"},
    ]
    alone = [mtplx.generate(bundle, [5, 6], **o).token_ids for o in options]
    streams = [mtplx.stream(bundle, [5, 6], **o) for o in options]
    turns = [iter(stream) for stream in streams]
    while turns:
        turns = [turn for turn in turns if next(turn, None) is not None]
    assert [stream.result().token_ids for stream in streams] == alone


# --- characters -------------------------------------------------------------------------------

TEXT = "h\u00e9llo \U0001f600 w\u00f6rld \U0001f468\u200d\U0001f469\u200d\U0001f467 \u20ac1"


def spoken(text, depth, stops=(), cut=0, draft=True):
    """A stream that says ``text``, byte tokens and all, drafted in blocks of ``depth``."""
    tokenizer = Tokenizer(tiny_tokenizer(), eos_ids=[EOS], vocab_size=320)
    script = tokenizer.encode(text)[: -cut or None]
    family = ExactFamily(scripted_logits([*script, EOS], 1, 320), 320)
    sequence = new_sequence(
        family, [5], KnowingDrafter(1, [*script, EOS]) if draft else NgramDrafter(), depth=depth,
        eos_ids=[EOS], stops=stops, detokenizer=tokenizer.detokenizer(), max_tokens=200,
    )  # fmt: skip
    return Stream(sequence, 320)


@pytest.mark.parametrize("depth", range(9))
def test_a_character_is_never_split(depth):
    chunks = list(spoken(TEXT, depth))
    assert "".join(chunk.text for chunk in chunks) == TEXT
    for chunk in chunks:
        assert "\ufffd" not in chunk.text
        chunk.text.encode("utf-8")


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1, 3, 5])
def test_half_a_character_at_the_end_comes_out_once(depth, cut):
    """As the tokenizer itself decodes it: one replacement character, after all the rest."""
    result = spoken("ab\U0001f600", depth, cut=cut).result()
    assert result.text == "ab\ufffd"
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("depth", range(7))
def test_a_stop_may_be_an_emoji_in_bytes(depth):
    result = spoken(TEXT, depth, stops=["\U0001f600 w\u00f6"]).result()
    assert result.text == "h\u00e9llo "
    assert result.finish_reason == "stop"
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(result.token_ids) == "h\u00e9llo "


def test_every_refusal_is_an_mtplx_error(bundle):
    for call in (lambda: mtplx.generate(bundle, []), lambda: Options(depth=-1)):
        with pytest.raises(MtplxError):
            call()


def test_streamed_ids_are_the_result_s_ids_with_stops_across_tokens_and_rounds(bundle):
    """Whatever a stop string cuts is never streamed, ids included."""
    options = {"sampling": mtplx.SamplerConfig(temperature=0.0), "max_tokens": 24, "seed": 1}
    whole = mtplx.generate(bundle, "hello", **options).text
    for start in range(1, len(whole) - 3, 2):
        stop = whole[start : start + 3]
        run = mtplx.stream(bundle, "hello", stop=stop, **options)
        ids = [token for chunk in run for token in chunk.token_ids]
        assert ids == run.result().token_ids


def test_a_prompt_of_bytes_is_refused_and_one_of_numpy_ids_is_not(bundle):
    with pytest.raises(RequestError, match="bytes"):
        mtplx.generate(bundle, b"hello")
    ids = np.array([5, 6, 7])
    one = mtplx.generate(bundle, ids, max_tokens=3, seed=1)
    assert one.token_ids == mtplx.generate(bundle, [5, 6, 7], max_tokens=3, seed=1).token_ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        (None, "must be a string"),
        (5, "must be a string"),
        ("\ud800", "Unicode"),
        ([{"role": "user", "content": "hi"}, 3], "chat messages and other things"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_in_words(bundle, prompt, words):
    with pytest.raises(RequestError, match=words):
        mtplx.generate(bundle, prompt)


def test_numpy_integers_are_integers(bundle):
    one = mtplx.generate(bundle, [5, 6], seed=np.int64(3), max_tokens=np.int32(4))
    assert one.token_ids == mtplx.generate(bundle, [5, 6], seed=3, max_tokens=4).token_ids
    assert type(one.seed) is int


def test_a_stop_string_over_rounds_leaves_the_acceptance_length_at_one_or_more(bundle):
    options = {"sampling": SamplerConfig(temperature=0.0), "seed": 1, "draft": "none"}
    whole = mtplx.generate(bundle, "hello", max_tokens=16, **options).text
    result = mtplx.generate(bundle, "hello", max_tokens=16, stop=whole[4:12], **options)
    assert result.stats.tokens < result.stats.rounds
    assert result.stats.acceptance_length == 1.0
