"""The measurement of a head: its sums, its order of runs, and the shape of what it writes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from doubles import randomise

from mtplx import load, measure
from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.errors import RequestError
from mtplx.measure import Way, outputs_of, side_by_side, summed
from mtplx.metrics import Stats
from mtplx.mtp_patch import new_head
from mtplx.sampler_config import SamplerConfig
from mtplx.sequence import History

PROMPTS = {"mt-bench": ["say a b c", "what?"], "humaneval": ["def f"]}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A random trunk with a random head, which drafts from 200 of 320 ids."""
    bare = load(tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"), head="none")
    head = new_head(bare.trunk, vocabulary=DraftVocabulary(np.arange(200), 320))
    randomise(head, 0)
    return replace(bare, head=head)


@pytest.fixture(scope="module")
def measured(bundle):
    steps: list[str] = []
    found = measure.measure(bundle, PROMPTS, tokens=12, command="a command", before=steps.append)
    return found, steps


def test_the_object_has_the_agreed_shape(measured):
    found, _ = measured
    written = json.loads(json.dumps(found.to_dict()))
    assert set(written) == {
        "figures", "by_temperature", "command", "machine", "versions", "prompts", "notes",
    }  # fmt: skip
    assert set(written["by_temperature"]) == {"0", "0.6", "1"}
    for entry in written["by_temperature"].values():
        assert set(entry) == {
            "acceptance", "acceptance_length", "tokens_per_second", "ar_tokens_per_second", "speed",
        }  # fmt: skip
        assert all(0 <= share <= 1 for share in entry["acceptance"])
        assert entry["speed"] == pytest.approx(
            entry["tokens_per_second"] / entry["ar_tokens_per_second"]
        )
    assert written["prompts"] == {"mt-bench": 2, "humaneval": 1, "tokens_each": 12}
    assert written["command"] == "a command"
    for name in ("acceptance_1_t06", "accept_len_k3_t0", "accept_len_k3_t06", "accept_len_k3_t1",
                 "speed_vs_ar_t06", "round_overhead"):  # fmt: skip
        assert written["figures"][name] is not None
    assert 0 < written["figures"]["round_overhead"] < 1
    assert 0 < written["figures"]["verification_cost_t06"] < 1


def test_figures_are_those_of_the_outputs(measured):
    found, _ = measured
    for temperature, ways in found.outputs.items():
        entry = found.by_temperature[f"{temperature:g}"]
        stats = [output.stats for output in ways["k3"]]
        assert {s.rule for s in stats} == {"token"}
        rounds = sum(s.rounds for s in stats)
        assert entry["acceptance_length"] == sum(s.emitted for s in stats) / rounds
        kept, drafted = sum(s.accepted[0] for s in stats), sum(s.drafted[0] for s in stats)
        assert entry["acceptance"][0] == kept / drafted
        for output in ways["ar"]:
            assert output.stats.acceptance_length == 1.0
            assert output.stats.rounds == len(output.token_ids) <= 12
    plain = [output.token_ids for output in found.outputs[0.0]["ar"]]
    assert [output.token_ids for output in found.outputs[0.0]["k3"]] == plain
    assert found.figures["acceptance_1_t06"] == found.by_temperature["0.6"]["acceptance"][0]


def test_every_step_is_announced(measured):
    _, steps = measured
    assert len(steps) == outputs_of(3) == 3 * 3 * 3 + 3
    assert list(dict.fromkeys(steps)) == ["T = 0", "T = 0.6", "T = 1", "round overhead"]


def test_seeds_are_fixed(bundle):
    ways = {"k3": Way(bundle, "mtp", 3), "ar": Way(bundle, "none", 0)}
    sampling = SamplerConfig(temperature=1.0)
    once, again = (side_by_side(ways, ["a", "a"], sampling, tokens=8) for _ in range(2))
    for name in ways:
        ids = [output.token_ids for output in once[name]]
        assert ids == [output.token_ids for output in again[name]]
        assert ids[0] != ids[1]


def test_the_order_of_ways_is_turned_round_from_prompt_to_prompt():
    seen: list[tuple[str, str, int]] = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def start(self, prompt, sampling, *, seed, tokens, rule):
            seen.append((self.name, prompt, seed))
            return SimpleNamespace(result=lambda: self.name + prompt)

    found = side_by_side({n: Recorder(n) for n in "xyz"}, ["1", "2", "3"], SamplerConfig())
    assert "".join(name for name, _, _ in seen) == "xyz" + "zyx" + "xyz"
    assert found["y"] == ["y1", "y2", "y3"]
    assert all(seed == int(prompt) - 1 for _, prompt, seed in seen)


def test_sums_are_of_counters_not_of_ratios():
    one = Stats("mtp", "token", 3, tokens=10, rounds=5, emitted=10)
    one.drafted, one.accepted = [5, 4], [4, 1]
    one.draft_seconds, one.forward_seconds, one.other_seconds = 1.0, 2.0, 1.0
    two = Stats("mtp", "token", 3, tokens=2, rounds=1, emitted=3, forward_seconds=2.0)
    two.drafted, two.accepted = [1, 1, 1], [1, 1, 0]
    total = summed([SimpleNamespace(stats=one), SimpleNamespace(stats=two)])
    assert total.tokens_per_second == pytest.approx(12 / 6)
    assert total.acceptance_length == pytest.approx(13 / 6)
    assert total.acceptance_by_position == pytest.approx([5 / 6, 2 / 5, 0 / 1])
    assert one.drafted == [5, 4]


def test_overhead_is_what_the_forwards_do_not_take(bundle, monkeypatch):
    """Slow laws make it large, a slow head small."""

    def slowed(call):
        def slow(*arguments, **options):
            time.sleep(0.04)
            return call(*arguments, **options)

        return slow

    def overhead() -> float:
        return measure._round_overhead(Way(bundle, "mtp", 3), ["a"], 5, lambda _: None)

    with monkeypatch.context() as patch:
        patch.setattr(History, "draft_law", slowed(History.draft_law))
        assert overhead() > 0.5
    kind = type(bundle.attached)  # the one that runs, on the kernels or not
    monkeypatch.setattr(kind, "forward", slowed(kind.forward))
    assert overhead() < 0.5


def test_a_model_without_a_head_is_refused(bundle):
    with pytest.raises(RequestError, match="MTP head"):
        measure.measure(replace(bundle, head=None), PROMPTS)
