"""JSON schemas and regular expressions: what is allowed, that outputs parse, what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from doubles import GREEDY, ExactFamily, KnowingDrafter, RandomDrafter, hashed_logits, new_sequence
from doubles import run as run_all
from tiny import EOS, tiny_tokenizer, write_directory

import mtplx
from mtplx.drafters import NgramDrafter
from mtplx.errors import NonFiniteLogitsError, RequestError
from mtplx.grammar import compile_grammar
from mtplx.sampler_config import SamplerConfig
from mtplx.tokenizer import Tokenizer
from mtplx.verify import RULES

VOCAB = 320  # the tokenizer knows 271 of them
TOKENIZER = Tokenizer(tiny_tokenizer(), eos_ids=[EOS], vocab_size=VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["the", "and", 7]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
REGEX = r"(the|and){1,3}-[0-9]{2,4}"


def grammar(regex=REGEX):
    return compile_grammar(TOKENIZER, regex=regex)


def allowed(mask):
    return {TOKENIZER.token_text(int(i)) for i in np.flatnonzero(mask)}


# --- masks ------------------------------------------------------------------------------------


def test_masks_of_drafted_positions_leave_the_grammar_where_it_was():
    walker = grammar("(the|an)d?[0-9]")
    first = walker.mask([])
    assert first.shape == (VOCAB,)
    assert allowed(first) == {"t", "th", "the", "a", "an", "and"}
    ids = TOKENIZER.encode("the4")
    assert allowed(walker.mask(ids[:1])) == {"d", *"0123456789"}
    assert np.flatnonzero(walker.mask(ids)).tolist() == [EOS]
    for wrong in ([*ids, ids[0]], ids[::-1], [VOCAB - 1], [1]):
        assert walker.mask(wrong) is None
        np.testing.assert_array_equal(walker.mask([]), first)
    walker.advance(ids[0])
    assert allowed(walker.mask([])) == {"d", *"0123456789"}
    assert walker.mask(ids) is None


def test_an_end_of_sequence_is_allowed_exactly_where_the_text_matches():
    walker = grammar("a{2,3}")
    a = TOKENIZER.encode("a")
    assert [bool(walker.mask(a * i)[EOS]) for i in range(4)] == [False, False, True, True]
    assert allowed(walker.mask(a * 3)) == {"<|im_end|>"}
    two = Tokenizer(tiny_tokenizer(), eos_ids=[EOS, 0], vocab_size=VOCAB)
    mask = compile_grammar(two, regex="a").mask(a)
    assert np.flatnonzero(mask).tolist() == [0, EOS]


def test_a_token_that_does_not_fit_is_never_committed():
    walker = grammar()
    with pytest.raises(RequestError, match="regex"):
        walker.advance(TOKENIZER.encode("x")[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "("}, "^regex: .*invalid regex.*unclosed group"),
        ({"regex": r"[^\s\S]"}, "^regex: no text matches"),
        ({"json_schema": "{"}, "^json_schema is not JSON"),
        ({"json_schema": "[1]"}, "^json_schema: "),
        ({"json_schema": "false"}, "^json_schema: .*[Uu]nsatisfiable"),
        ({"json_schema": '{"type": "number", "minimum": 5, "maximum": 3}'}, "^json_schema: .*mini"),
        ({"json_schema": '{"type": "nope"}'}, "^json_schema: .*nope"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_is_refused_by_name(given, message):
    with pytest.raises(RequestError, match=message):
        compile_grammar(TOKENIZER, **given)


def test_a_grammar_needs_an_end_of_sequence():
    with pytest.raises(RequestError, match=r"regex needs .* end-of-sequence"):
        compile_grammar(Tokenizer(tiny_tokenizer(), vocab_size=VOCAB), regex="a")


# --- outputs ----------------------------------------------------------------------------------


def sequence_of(seed, drafter=None, *, how, config, rule="coupled", depth=0):
    family = ExactFamily(hashed_logits(VOCAB, seed=seed, scale=2.0), VOCAB)
    return new_sequence(
        family, TOKENIZER.encode("the and"), drafter, rule=rule, depth=depth, seed=seed,
        config=config, max_tokens=90, eos_ids=[EOS], grammar=compile_grammar(TOKENIZER, **how),
        detokenizer=TOKENIZER.detokenizer(),
    )  # fmt: skip


def matches(text, how):
    if "regex" in how:
        return re.fullmatch(how["regex"], text) is not None
    found = json.loads(text)
    return list(found) == ["name", "tags", "ok"] and len(found["name"]) <= 4


HOWS = [{"regex": REGEX}, {"json_schema": json.dumps(SCHEMA)}]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
@pytest.mark.parametrize("how", HOWS, ids=["regex", "schema"])
def test_outputs_match_and_are_plain_decodings(how, temperature):
    config = SamplerConfig(temperature=temperature, top_p=0.99, top_k=0, repetition_penalty=1.1)
    for seed in range(3):
        plain = run_all(sequence_of(seed, how=how, config=config))
        text = "".join(segment.text for segment in plain.segments)
        assert plain.finish_reason == "stop"
        assert matches(text, how), text
        output = plain.token_ids
        start = len(plain.tokens) - len(output)
        for depth, drafter in (
            (4, RandomDrafter(seed)), (5, KnowingDrafter(start, output)),
            (3, KnowingDrafter(start, output, shift=1)), (2, NgramDrafter(shortest=1)),
        ):  # fmt: skip
            other = run_all(sequence_of(seed, drafter, how=how, config=config, depth=depth))
            assert other.token_ids == output


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("how", HOWS, ids=["regex", "schema"])
def test_outputs_match_under_every_rule(how, rule):
    config = SamplerConfig(temperature=1.5, top_p=1.0, top_k=0)
    for seed in range(4):
        sequence = run_all(
            sequence_of(seed, RandomDrafter(seed), how=how, config=config, rule=rule, depth=3)
        )
        text = "".join(segment.text for segment in sequence.segments)
        assert sequence.finish_reason == "stop"
        assert matches(text, how), text


@pytest.mark.parametrize("rule", sorted(RULES))
def test_greedy_outputs_are_the_same_with_every_rule(rule):
    plain = run_all(sequence_of(1, how=HOWS[1], config=GREEDY))
    for depth in (1, 4):
        other = sequence_of(1, RandomDrafter(1), how=HOWS[1], config=GREEDY, rule=rule, depth=depth)
        assert run_all(other).token_ids == plain.token_ids


# --- the library ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return mtplx.load(write_directory(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("seed", [1, None])
def test_generate_takes_a_schema_and_a_regex(bundle, seed):
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        result = mtplx.generate(bundle, "Say.", json_schema=schema, seed=seed)
        assert matches(result.text, HOWS[1])
        assert result.finish_reason == "stop"
    assert matches(mtplx.generate(bundle, "Say.", regex=REGEX, seed=seed).text, HOWS[0])
    assert mtplx.generate(bundle, "Say.", json_schema={"const": 5}, seed=seed).text == "5"
    whole = mtplx.generate(bundle, "a b a b", regex="(a b ){6}", seed=seed, draft="ngram")
    assert whole.text == "a b " * 6


def test_what_bans_leave_nothing_of_is_an_error(bundle):
    ban = SamplerConfig(banned_ids=[EOS])
    with pytest.raises(NonFiniteLogitsError, match="regex and logit_bias or banned_ids"):
        mtplx.generate(bundle, "a", regex="[0-9]", sampling=ban)
    with pytest.raises(NonFiniteLogitsError, match="regex and min_tokens"):
        mtplx.generate(bundle, "a", regex="[0-9]", min_tokens=3)


def test_min_tokens_and_bans_reach_the_law(bundle):
    eager = SamplerConfig(logit_bias={EOS: 40.0})
    assert mtplx.generate(bundle, "a", sampling=eager).token_ids == [EOS]
    result = mtplx.generate(bundle, "a", sampling=eager, min_tokens=5)
    assert len(result.token_ids) == 6
    assert result.token_ids.index(EOS) == 5
    again = mtplx.generate(bundle, "a", sampling=SamplerConfig(temperature=0), max_tokens=1)
    ban = SamplerConfig(temperature=0, banned_ids=again.token_ids)
    assert mtplx.generate(bundle, "a", sampling=ban, max_tokens=1).token_ids != again.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": -1}, "min_tokens must be"),
        ({"min_tokens": 300}, "min_tokens 300 is above max_tokens"),
        ({"regex": 5}, "regex must be"),
        ({"regex": "a", "json_schema": {}}, "not both"),
        ({"json_schema": {"a": object()}}, "json_schema cannot"),
        ({"json_schema": [1]}, "json_schema"),
        ({"logprobs": 1}, "logprobs must be"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be"),
    ],
)
def test_bad_options_are_refused_by_name(bundle, options, message):
    with pytest.raises(RequestError, match=message):
        mtplx.generate(bundle, "a", **options)


@pytest.mark.parametrize("bad", [[-1], ["a"], [True], "7", 7, [1.5]])
def test_bad_bans_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="banned_ids"):
        SamplerConfig(banned_ids=bad)


def test_a_ban_is_a_bias():
    config = SamplerConfig(banned_ids=[4, 4, 7], logit_bias={4: 2.0, 5: 1.0})
    assert config.logit_bias == {4: -np.inf, 5: 1.0, 7: -np.inf}
    assert hash(config) != hash(SamplerConfig())
