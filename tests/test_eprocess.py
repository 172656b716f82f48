"""The sequential test: which tokens are bet on, that it is fair, that it finds a leak."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
from doubles import ExactFamily, RandomDrafter, hashed_logits, new_sequence

import mtplx
from mtplx import engine
from mtplx.api import start
from mtplx.certify.engine_play import Request, _announcing
from mtplx.certify.engine_play import new_sequence as new_request
from mtplx.certify.eprocess import EProcess, bets_of
from mtplx.certify.forking import play_all, swapped
from mtplx.certify.run import PROMPTS
from mtplx.distribution import as_dense
from mtplx.engine import Engine
from mtplx.options import Options
from mtplx.sampler_config import SamplerConfig
from mtplx.verify import RULES

P, Q = np.array([0.7, 0.2, 0.1, 0.0]), np.array([0.2, 0.2, 0.2, 0.4])
TV = 0.5

# --- bets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafted", "emitted", "placed"),
    [
        ([], [5], 0),  # no q
        ([1, 2], [1, 2, 3], 2),  # no q for the bonus
        ([1, 2], [1, 3], 2),  # the recovered token stands where a draft stood
        ([1, 2], [3], 1),  # behind it q is of another text
        ([1, 2], [1], 1),  # the output ended
    ],
)
def test_bets_are_placed_up_to_the_first_draft_that_was_not_emitted(drafted, emitted, placed):
    draft = SimpleNamespace(tokens=drafted, q_rows=[f"q{i}" for i in range(len(drafted))])
    rows = [f"p{i}" for i in range(len(drafted) + 1)]
    done = SimpleNamespace(draft=draft, emitted=emitted, p_rows=rows)
    assert list(bets_of(done)) == [(f"p{i}", f"q{i}", emitted[i]) for i in range(placed)]


def test_the_wealth_is_the_likelihood_ratio():
    process = EProcess(alpha=1e-3, delta=0.05)
    expected = 1.0
    for token in (0, 2, 1, 0):
        process.bet(P, Q, token)
        expected *= (0.9 * P + 0.1 * Q)[token] / P[token]
    assert exp(process.log_wealth) == pytest.approx(expected, rel=1e-12)
    assert (process.tokens, process.close, process.decision) == (4, 0, None)


def test_no_bet_where_the_laws_nearly_agree_and_no_token_certifies_alone():
    process = EProcess(alpha=1e-3, delta=TV / 2 + 1e-9)
    process.bet(P, Q, 0)
    assert (process.tokens, process.close) == (0, 1)
    process = EProcess(alpha=1e-3, delta=TV / 2)
    process.bet(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 1)
    assert process.log_wealth == pytest.approx(-log(2))


def test_a_token_of_no_probability_refutes():
    process = EProcess()
    process.bet(P, Q, 3)
    assert (process.decision, process.impossible) == ("refuted", 1)
    process.bet(P, Q, 0)
    assert process.tokens == 1, "after a decision there are no bets"


@pytest.mark.parametrize(("alpha", "delta"), [(0.0, 0.1), (1.0, 0.1), (0.1, 0.0), (0.1, 0.51)])
def test_parameters_are_checked(alpha, delta):
    with pytest.raises(ValueError, match="alpha"):
        EProcess(alpha, delta)


# --- fair, by enumeration of the engine's own draws ---------------------------------------------

CASE = Request(vocab=2, max_tokens=4, depth=3)


def expected_wealth(rule, watch):
    """E W at the end of a request, over every outcome of the engine's draws."""

    def play(noise):
        process = EProcess(alpha=1e-12, delta=0.1)
        sequence = new_request(rule, CASE)
        runner = Engine(CASE.vocab, on_round=lambda done: watch(process, done))
        with swapped(engine, verify=_announcing(noise)):
            while sequence.finish_reason is None:
                runner.step([sequence])
        return exp(process.log_wealth)

    return sum(weight * wealth for weight, wealth in play_all(play))


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_wealth_has_expectation_one_under_the_shipped_engine(rule):
    assert expected_wealth(rule, EProcess.watch) == pytest.approx(1.0, abs=1e-12)


def test_a_bet_on_kept_drafts_alone_is_not_fair():
    def kept_only(process, done):
        for i, (p, q, token) in enumerate(bets_of(done)):
            if i < done.verdict.accepted:
                process.bet(p, q, token)

    assert abs(expected_wealth("token", kept_only) - 1.0) > 1e-3


# --- on rows of a correct engine ----------------------------------------------------------------

ALPHA, DELTA = 1e-3, 0.01


WIDTH = 64


def compact(p, q):
    """A pair of laws on the ids that either of them has, the rest of ``WIDTH`` places empty."""
    p, q = as_dense(p), as_dense(q)
    ids = np.flatnonzero((p > 0) | (q > 0))
    out = np.zeros((2, WIDTH))
    out[:, : ids.size] = p[ids], q[ids]
    return out


def recorded(play):
    """(p, q), each (n, WIDTH): the rows of the bets of what ``play`` runs."""
    found = []
    play(lambda done: found.extend(compact(p, q) for p, q, _ in bets_of(done)))
    return tuple(np.array(found).swapaxes(0, 1))


def of_a_toy(on_round):
    """24 tokens, filters, a poor drafter."""
    config = SamplerConfig(temperature=1.0, top_p=0.95, top_k=20)
    for seed in range(40):
        sequence = new_sequence(
            ExactFamily(hashed_logits(24, seed=seed), 24), [1, 2], RandomDrafter(seed),
            rule=("token", "block")[seed % 2], depth=3, seed=seed, config=config, max_tokens=40,
        )  # fmt: skip
        while sequence.finish_reason is None:
            Engine(24, on_round).step([sequence])


def of_the_default_model(on_round, path):
    """Its own head, default sampling, token and block rule."""
    bundle = mtplx.load(path)
    for seed, prompt in enumerate(PROMPTS):
        options = Options(max_tokens=48, seed=seed, depth=3, verify=("token", "block")[seed % 2])
        start(bundle, prompt, options, on_round).result()


@pytest.fixture(scope="module", params=["toy", pytest.param("model", marks=pytest.mark.model)])
def rows(request):
    if request.param == "toy":
        return recorded(of_a_toy)
    path = request.getfixturevalue("default_model_path")
    return recorded(lambda on_round: of_the_default_model(on_round, path))


def leak_of(p, q, leak):
    distance = np.maximum(p - q, 0).sum(axis=1)
    share = np.where(distance >= 2 * DELTA, leak / np.maximum(distance, DELTA), 0)
    return (1 - share[:, None]) * p + share[:, None] * q


def paths(p, q, leak, runs, tokens):
    """log W after each bet, (runs, tokens), on tokens that follow p, or lean towards q."""
    generator = np.random.default_rng(7)
    law, alternative = leak_of(p, q, leak), leak_of(p, q, DELTA)
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = np.where(p > 0, np.log(alternative / p), np.inf)
    cumulative = law.cumsum(axis=1)
    out = []
    for _ in range(runs):
        which = generator.integers(len(p), size=tokens)
        drawn = (cumulative[which] < generator.random((tokens, 1))).sum(axis=1)
        out.append(gains[which, np.minimum(drawn, p.shape[1] - 1)].cumsum())
    return np.array(out), which, drawn


def test_the_paths_are_the_shipped_process(rows):
    found, which, drawn = paths(*rows, 0.0, 1, 300)
    process = EProcess(ALPHA, DELTA)
    for i, token in zip(which, drawn, strict=True):
        process.bet(rows[0][i], rows[1][i], int(token))
    bets = np.maximum(rows[0] - rows[1], 0).sum(axis=1)[which] >= 2 * DELTA
    expected = found[0][bets][: process.tokens]
    np.testing.assert_allclose(process.path, expected, rtol=0, atol=1e-9)


def test_no_false_alarm_in_200_runs(rows):
    found, *_ = paths(*rows, 0.0, 200, 10_000)
    assert not (found >= -log(ALPHA)).any()


def test_a_leak_of_one_percent_is_refuted_in_every_run(rows):
    found, *_ = paths(*rows, DELTA, 10, 60_000)
    hits = found >= -log(ALPHA)
    assert hits.any(axis=1).all()
    first = hits.argmax(axis=1) + 1
    assert not ((found <= log(ALPHA)) & (np.arange(found.shape[1]) < first[:, None])).any()
    print(f"\n1 % leak, {len(rows[0])} rows: refuted after {median(first.tolist()):.0f} bets")


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_running_engine_is_certified(rule):
    process = EProcess(alpha=1e-3, delta=0.1)
    for seed in range(200):
        sequence = new_request(rule, replace(CASE, seed=seed, max_tokens=40))
        sequence.draws = replace(sequence.draws, seed=seed)
        while sequence.finish_reason is None:
            Engine(CASE.vocab, on_round=process.watch).step([sequence])
        if process.decision is not None:
            break
    assert process.decision == "certified", process
