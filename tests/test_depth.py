"""The depth controller: what it estimates, what it chooses, where it gives up."""

from __future__ import annotations

import numpy as np
import pytest

from mtplx.depth import (
    COPY_LIMIT,
    DEFAULT_COSTS,
    HEAD_LIMIT,
    PROBE_EVERY,
    AdaptiveDepth,
    CopyDepth,
    Costs,
    best,
)

SMOOTH = Costs(
    (1.0, 1.1, 1.2, 1.3, 1.38, 1.45, 1.52, 1.6, 1.65, 1.7, 1.75, 1.8, 1.85, 1.9, 1.95, 2.0), 0.09
)
FLAT = Costs((1.0, 1.02, 1.04), 0.01)
STEEP = Costs((1.0, 1.9, 2.8), 0.3)
# A second row is dear, more of them are free: no single draft pays, several do.
STARTED = Costs((1.0, 1.15, 1.4, 1.6, 1.95), 0.07, 0.2)
STEP = Costs((1.0, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6), 0.02)


def depth_of(policy: AdaptiveDepth) -> int:
    return next(n for n in range(HEAD_LIMIT + 1) if not policy.more([0.5] * n))


def play(policy, rounds, chance, confidence=lambda generator: 0.5, seed=0):
    """Depths of so many rounds; ``chance(position, confidence)`` of a draft to be kept."""
    generator, depths = np.random.default_rng(seed), []
    for _ in range(rounds):
        placed: list[float] = []
        while len(placed) < HEAD_LIMIT and policy.more(placed):
            placed.append(confidence(generator))
        kept = 0
        while kept < len(placed) and generator.random() < chance(kept, placed[kept]):
            kept += 1
        policy.observe(placed, kept)
        depths.append(len(placed))
    return depths


# --- costs ------------------------------------------------------------------------------------


def test_costs_by_hand():
    costs = Costs((2.0, 3.0, 4.0), 0.5)
    assert [costs.copying(n) for n in (0, 1, 2, 3, 5)] == [2.0, 3.0, 4.0, 5.0, 7.0]
    assert [costs.drafting(n) for n in (0, 1, 4)] == [2.0, 3.5, 8.0]
    assert costs.relative() == Costs((1.0, 1.5, 2.0), 0.25)
    started = Costs((2.0, 3.0, 4.0), 0.5, 0.3)
    assert [started.drafting(n) for n in (0, 1, 4)] == [2.0, 3.8, 8.3]
    assert [started.copying(n) for n in (0, 1)] == [2.0, 3.0]
    assert started.relative() == Costs((1.0, 1.5, 2.0), 0.25, 0.15)
    assert Costs((3.0,)).copying(7) == 3.0
    assert Costs((3.0, 2.0)).copying(7) == 2.0, "noise never makes more rows cheaper and cheaper"


@pytest.mark.parametrize(
    ("forward", "draft"),
    [((), 0.0), ((1.0, 0.0), 0.0), ((1.0, -1.0), 0.0), ((float("nan"),), 0.0), ((1.0,), -0.1),
     ((1.0,), float("inf"))],
)  # fmt: skip
def test_what_is_no_cost_is_refused(forward, draft):
    with pytest.raises(ValueError, match="cost"):
        Costs(forward, draft)


# --- the choice -------------------------------------------------------------------------------


def brute_force(acceptance, cost):
    """(rate, depth) over every depth, by the definition."""
    survivals = [np.prod(acceptance[: k + 1]) for k in range(len(acceptance))]
    rates = [(1 + sum(survivals[:k])) / cost(k) for k in range(len(acceptance) + 1)]
    return max(rates), int(np.argmax(rates))


def test_the_best_depth_is_that_of_brute_force():
    generator = np.random.default_rng(0)
    for _ in range(300):
        acceptance = generator.random(generator.integers(0, 12)).tolist()
        forward = tuple(1.0 + np.cumsum(generator.random(9) * 0.3))
        costs = Costs(forward, generator.random() * 0.2, generator.random() * 0.2)
        for cost in (costs.drafting, costs.copying):
            rate, depth = brute_force(acceptance, cost)
            assert best(acceptance, cost) == (pytest.approx(rate), depth)


@pytest.mark.parametrize("costs", [SMOOTH, FLAT, STEEP, STARTED, STEP, DEFAULT_COSTS])
@pytest.mark.parametrize(
    "table", [(0.9, 0.85, 0.8, 0.8), (0.6, 0.55, 0.5, 0.5), (0.75,) * 4, (0.2,) * 4, (0.95,) * 4]
)
def test_the_rate_in_the_long_run_is_that_of_the_best_fixed_depth(costs, table):
    """Acceptance by position alone: once it is known, nothing is lost but what probes cost."""
    known = [table[min(k, 3)] for k in range(HEAD_LIMIT)]
    depths = play(AdaptiveDepth(costs), 2000, lambda k, _: known[k])[500:]
    survival = np.cumprod(known)
    tokens = sum(1 + survival[:k].sum() for k in depths)
    rate = tokens / sum(costs.drafting(k) for k in depths)
    highest, depth = brute_force(known, costs.drafting)
    # On jagged costs a probe of one draft more is dear.
    assert rate > (0.94 if not depth else 0.985 if costs is DEFAULT_COSTS else 0.99) * highest


def test_at_the_start_depth_follows_the_priors():
    assert AdaptiveDepth(SMOOTH).best(HEAD_LIMIT).depth == 2
    assert depth_of(AdaptiveDepth(SMOOTH)) == 2
    assert depth_of(AdaptiveDepth(FLAT)) > 3
    assert depth_of(AdaptiveDepth(STEEP)) == 0


def test_several_drafts_may_pay_where_one_does_not():
    policy = AdaptiveDepth(STEP)
    one = (1 + 0.6) / STEP.drafting(1)
    assert one < 1 < policy.best(HEAD_LIMIT).rate
    assert policy.more([])
    assert policy.best(1).depth == 0


def test_rejections_bring_it_to_depth_0_and_a_probe_brings_it_back():
    policy = AdaptiveDepth(SMOOTH)
    depths = play(policy, 400, lambda *_: 0.02)
    assert depths[0] == 2
    late = depths[100:]
    probes = late[-101 % PROBE_EVERY :: PROBE_EVERY]
    assert min(probes) == 1
    assert sum(late) - sum(probes) < 0.05 * len(late), "plain decoding but for probes"
    back = play(policy, 600, lambda *_: 0.95)
    assert min(back[-50:]) > 3


def test_acceptance_near_1_takes_it_deep_and_never_past_the_limit():
    depths = play(AdaptiveDepth(SMOOTH), 300, lambda *_: 0.99)
    assert set(depths[-100:]) == {HEAD_LIMIT}
    probing = AdaptiveDepth(FLAT)
    for _ in range(PROBE_EVERY):
        assert not probing.more([1.0] * HEAD_LIMIT)
        probing.observe([1.0] * HEAD_LIMIT, HEAD_LIMIT)


def test_a_probe_is_one_draft_more_than_pays():
    policy = AdaptiveDepth(SMOOTH)
    depths = play(policy, 1600, lambda k, _: (0.6, 0.5, 0.4, 0.4)[min(k, 3)])
    probes, before = depths[PROBE_EVERY - 1 :: PROBE_EVERY], depths[PROBE_EVERY - 2 :: PROBE_EVERY]
    assert np.mean(probes) - np.mean(before) == pytest.approx(1, abs=0.1)


def test_it_follows_a_text_that_changes():
    policy = AdaptiveDepth(SMOOTH)
    assert min(play(policy, 300, lambda *_: 0.95)[-20:]) > 3
    assert np.mean(play(policy, 300, lambda *_: 0.05)[-50:]) < 0.5
    assert min(play(policy, 100, lambda *_: 0.95)[-20:]) > 3


def test_a_confident_draft_is_followed_by_more():
    """Acceptance equals confidence: sure drafts are built upon, doubtful ones are not."""
    policy = AdaptiveDepth(SMOOTH)
    values = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
    play(policy, 2000, lambda _, c: c, lambda generator: generator.choice(values))
    assert not policy.more([0.1])
    assert not policy.more([0.3])
    assert policy.more([0.99])
    assert policy.more([0.99, 0.99])
    assert not policy.more([0.99, 0.1])


def test_drafts_behind_a_rejection_tell_nothing():
    seen, cut = AdaptiveDepth(FLAT), AdaptiveDepth(FLAT)
    seen.observe([0.5, 0.9, 0.1, 0.3], 1)
    cut.observe([0.5, 0.9], 1)
    for placed in ([], [0.5], [0.5, 0.9], [0.1, 0.1, 0.3]):
        assert seen.best(HEAD_LIMIT) == cut.best(HEAD_LIMIT)
        assert seen.more(placed) == cut.more(placed)
    assert vars(seen)["_seen"]._tried == vars(cut)["_seen"]._tried


# --- copies -----------------------------------------------------------------------------------


def test_a_copy_is_judged_by_the_length_of_its_match():
    policy = CopyDepth(SMOOTH)
    short, long = (policy.best(n, COPY_LIMIT) for n in (2, 5))
    assert long.rate > short.rate > 1
    assert long.depth > short.depth
    assert policy.best(5, 3).depth == 3
    assert policy.best(5, 64).depth <= COPY_LIMIT
    for nothing in (policy.best(0, 0), policy.best(3, 0)):
        assert nothing == (1.0, 0)


def test_copies_are_learnt_from_what_was_emitted_whoever_drafted():
    """Two of three right after a match of 2; the third counts as copied after 4 tokens."""
    policy, length_2 = CopyDepth(SMOOTH), 1
    for _ in range(60):
        policy.observe(2, [7, 8, 9, 9], [7, 8, 5, 9])
    tried = policy._lengths._tried
    assert tried[length_2] == tried[length_2 + 1] == tried[length_2 + 2] > 30
    assert tried[0] == tried[length_2 + 3] == 0
    assert min(policy._rate(2), policy._rate(3)) > 0.8
    assert policy._rate(4) < 0.2
    assert policy.best(2, COPY_LIMIT).depth == 2
    assert policy.best(4, COPY_LIMIT).depth == 0


def test_a_round_without_a_match_only_lets_time_pass():
    policy = CopyDepth(SMOOTH)
    policy.observe(2, [7], [7])
    before = policy._rate(2)
    policy.observe(0, [], [3, 4])
    assert policy._rate(2) < before
