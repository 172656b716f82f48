"""The joint law of whole blocks and the rounds after them, by enumeration, and of whole requests.

The cases and what plays them are the certificate's own (``mtplx.certify``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtplx.certify.cases import BLOCKS, depth, markov
from mtplx.certify.engine_play import REQUESTS, request_distance
from mtplx.certify.enumeration import EXACT, FLIPS, Case, round_of, total_variation
from mtplx.certify.forking import Noise
from mtplx.rng import Draws
from mtplx.verify import RULES


def test_it_is_known_where_the_coins_of_every_rule_flip():
    assert set(FLIPS) == set(RULES)


@pytest.mark.parametrize("case", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_is_the_product_of_p(rule, case):
    assert total_variation(rule, case) <= EXACT


@pytest.mark.parametrize("case", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_of_the_running_engine_is_plain_decodings(rule, case):
    assert request_distance(rule, case) <= EXACT


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_joint_law_of_random_pairs(rule, seed):
    p = markov(3, 100 + seed, zeros=0.15 * (seed % 3), order=2, sparse=bool(seed % 2))
    case = Case(p, markov(3, 200 + seed, zeros=0.3 * (seed % 2)), depth(2), 3)
    assert total_variation(rule, case) <= EXACT


def test_the_coupled_rule_emits_what_plain_decoding_emits():
    """Path by path, with the real noise: drafts of any quality change nothing."""
    for seed in range(60):
        case = replace(BLOCKS["depth by history"], p=markov(3, seed, 0.2, 2))
        draws, text, plain = Draws(seed, seed), (), ()
        while len(text) < 12:
            text += round_of("coupled", case, text, len(text), draws, Noise())
        while len(plain) < len(text):
            plain += (Draws(seed).race(len(plain), case.p(plain)),)
        assert text == plain


def test_the_coupled_rule_keeps_every_draft_of_p_itself():
    law = markov(3, 1)
    for seed in range(40):
        case = Case(law, law, depth(3), 3)
        assert len(round_of("coupled", case, (), 0, Draws(seed), Noise())) == 4
