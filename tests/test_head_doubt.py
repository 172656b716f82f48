"""A head that is no better than chance is told, and no other."""

from __future__ import annotations

import json
from fractions import Fraction
from math import comb

import heads
import mlx.core as mx
import numpy as np
import pytest
import test_cli
import tiny
from doubles import (
    PLAIN,
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    hashed_logits,
    new_sequence,
    randomise,
    run,
)

import mtplx
from mtplx.drafters import Draft
from mtplx.measure import summed
from mtplx.metrics import Stats
from mtplx.mtp_patch import new_head
from mtplx.sampler_config import SamplerConfig

LONG = SamplerConfig(temperature=0.7, logit_bias={tiny.EOS: -np.inf})


def after(drafted, kept):
    return Stats("mtp", "token", 3, head_drafted=drafted, head_kept=kept)


@pytest.mark.parametrize(
    ("drafted", "kept", "doubted"),
    [
        (0, 0, False),
        (30, 0, False),
        (31, 0, True),
        (64, 3, True),
        (64, 4, False),
        (10_000, 600, True),
        (10_000, 601, False),
        (10_000_000, 1, True),
    ],
)
def test_it_takes_many_drafts_and_few_that_are_kept(drafted, kept, doubted):
    assert (after(drafted, kept).head_doubt is not None) == doubted


def test_a_head_that_keeps_a_fifth_is_doubted_once_in_a_thousand_requests():
    share = Fraction(1, 5)
    for drafted in range(1, 200):
        most = max((k for k in range(drafted + 1) if after(drafted, k).head_doubt), default=-1)
        chances = [
            comb(drafted, k) * share**k * (1 - share) ** (drafted - k) for k in range(most + 1)
        ]
        assert sum(chances) < Fraction(1, 1000)


def test_it_says_what_is_likely_wrong():
    doubt = after(64, 2).head_doubt
    for words in ("2 of 64", "norm", "hidden state", "another trunk"):
        assert words in doubt
    assert json.loads(json.dumps(after(64, 2).to_dict()))["head_doubt"] == doubt
    assert after(0, 0).to_dict()["head_doubt"] is None


class Named:
    """A drafter under the name of the head's."""

    name, needs_hidden = "mtp", False

    def __init__(self, inner):
        self.inner, self.observe = inner, inner.observe

    def propose(self, depth, proposal):
        draft = self.inner.propose(depth, proposal)
        return Draft(draft.tokens, draft.q_rows, self.name)


def counted(drafter, config=PLAIN, depth=2):
    family = ExactFamily(hashed_logits(256), 256)
    sequence = new_sequence(
        family, [3, 4], drafter, rule="token", depth=depth, config=config, max_tokens=120
    )
    return run(sequence).stats


def test_only_the_heads_first_drafts_count():
    stats = counted(Named(RandomDrafter(1)))
    assert stats.head_drafted == stats.drafted[0] > 31
    assert stats.head_kept == stats.accepted[0]
    others = counted(RandomDrafter(1))
    assert (others.head_drafted, others.head_kept, others.head_doubt) == (0, 0, None)
    both = summed([type("Output", (), {"stats": stats})] * 2)
    assert (both.head_drafted, both.head_kept) == (2 * stats.head_drafted, 2 * stats.head_kept)


def test_wrong_drafts_are_doubted_and_right_ones_are_not():
    greedy = SamplerConfig(temperature=0.0)
    family = ExactFamily(hashed_logits(256), 256)
    known = run(new_sequence(family, [3, 4], config=greedy, max_tokens=130)).tokens[2:]
    for shift, right in ((0, True), (1, False)):
        stats = counted(Named(KnowingDrafter(2, known, shift)), greedy, depth=1)
        assert stats.head_drafted > 31
        assert (stats.head_doubt is None) == right
        stats = counted(KnowingDrafter(2, known, shift), greedy, depth=1)
        assert stats.head_doubt is None, "no head drafted"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_directory(tmp_path_factory.mktemp("trunk"), tie_word_embeddings=False)


def test_a_head_with_scrambled_norms_is_doubted(folder):
    bundle = mtplx.load(folder)
    head = new_head(bundle.trunk)
    randomise(head, 1)
    rng = np.random.default_rng(0)
    scrambled = {n: rng.standard_normal(w.shape) for n, w in heads.parameters(head).items()
                 if "norm" in n}  # fmt: skip
    head.load_weights([(n, mx.array(w)) for n, w in scrambled.items()], False)
    wrong = mtplx.Bundle(bundle.trunk, head, bundle.tokenizer, bundle.provenance, "given")
    options = {"sampling": LONG, "max_tokens": 100, "seed": 1, "chat": False}
    stats = mtplx.generate(wrong, "the and", draft="mtp", depth=1, **options).stats
    assert "another trunk" in stats.head_doubt
    plain = mtplx.generate(wrong, "the and", draft="ngram", depth=1, **options).stats
    assert plain.head_doubt is None


def test_the_command_says_so_once(folder, tmp_path):
    heads.write(tmp_path / "head", mtplx.load(folder))
    command = ["generate", "the", "-m", str(folder), "--head", str(tmp_path / "head"), "-n", "90"]
    command += ["--min-tokens", "90", "--seed", "1", "--draft", "mtp", "--depth", "1"]
    for form in ([], ["--json"]):
        found = test_cli.run(*command, *form)
        assert found.returncode == 0
        assert found.stderr.decode().count("first drafts of the MTP head were kept") == 1
    assert "norm" in json.loads(found.stdout)["stats"]["head_doubt"]


@pytest.mark.model
def test_the_shipped_head_is_not_doubted():
    options = {"seed": 1, "draft": "mtp", "depth": 1, "max_tokens": 64, "min_tokens": 64}
    stats = mtplx.generate(mtplx.load(), "Name three rivers.", **options).stats
    assert stats.head_drafted > 31
    assert stats.head_doubt is None
