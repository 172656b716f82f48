"""Costs of rounds: measured, stored, found again, and what happens when that goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from time import sleep

import heads
import pytest
import tiny
from doubles import GREEDY

import mtplx
import mtplx.console
from mtplx import costs, native
from mtplx.cpu_layers import is_fused
from mtplx.depth import DEFAULT_COSTS, KERNEL_COSTS, VNNI_COSTS, Costs
from mtplx.engine import Engine
from mtplx.errors import MtplxError

SOME = Costs((0.01, 0.012, 0.014), 0.001, 0.002)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return mtplx.load(tiny.write_directory(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def headed(bare):
    return replace(bare, head=heads.random_head(bare))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path))
    return tmp_path / "costs.json"


@pytest.mark.parametrize("form", [{}, {"levels": (1,)}, {"ids": range(0, 320, 2)}])
def test_measuring_leaves_nothing_out(bare, form, monkeypatch):
    monkeypatch.setattr(costs, "PASSES", 3)
    bundle = replace(bare, head=heads.random_head(bare, **form))
    passes = []
    found = costs.measure(bundle, lambda: passes.append(1))
    assert len(passes) == 3
    assert len(found.forward) == costs.ROWS[-1]
    assert min(found.forward) > 0
    assert found.draft >= 0
    assert found.start >= 0
    assert found.forward[9] == pytest.approx(found.forward[8] * 0.75 + found.forward[12] * 0.25)


def test_a_model_without_a_head_has_no_cost_of_a_draft(bare, monkeypatch):
    monkeypatch.setattr(costs, "PASSES", 2)
    assert costs.measure(bare).draft == 0


def test_a_round_costs_what_is_around_its_forward_too(bare, monkeypatch):
    slow, step = 0.02, Engine.step

    def waiting(engine, sequences):
        sleep(slow)
        step(engine, sequences)

    monkeypatch.setattr(costs, "PASSES", 5)
    monkeypatch.setattr(Engine, "step", waiting)
    found = costs.measure(bare).forward
    assert min(found) > slow
    assert found[-1] < found[0] + slow, "once a round, not once a row"


@pytest.mark.parametrize("context", [64, None])
def test_measuring_stays_within_the_models_context(bare, context):
    config = {**bare.provenance.config, "max_position_embeddings": context}
    inner = {"text_config": {"max_position_embeddings": 50}}
    short = replace(bare, provenance=replace(bare.provenance, config=config))
    nested = replace(bare, provenance=replace(bare.provenance, config=inner))
    assert len(costs._context(short)) == (context or 141)
    assert len(costs._context(nested)) == 50


def test_what_is_stored_is_found_again(headed, bare, file):
    assert costs.stored(headed) is None
    assert costs.store(headed, SOME) == file
    assert costs.stored(headed) == SOME
    assert costs.stored(bare) is None, "with another head it costs something else"
    costs.store(bare, Costs((3.0,)))
    assert (costs.stored(headed), costs.stored(bare)) == (SOME, Costs((3.0,)))
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]
    known, told = costs.in_force(headed)
    assert known == Costs((1.0, 1.2, 1.4), 0.1, 0.2)
    assert told == {"from": "tuned", "forward": (1.0, 1.2, 1.4), "draft": 0.1, "start": 0.2}


def test_another_form_machine_or_version_has_costs_of_its_own(bare, file, monkeypatch):
    costs.store(bare, SOME)
    other = replace(bare, provenance=replace(bare.provenance, runs="packed"))
    assert costs.stored(other) is None
    for owner, name, value in (
        (costs, "machine", lambda: {"cores": "1"}),
        (costs, "__version__", "0"),
        (native, "VERSION", "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert costs.stored(bare) is None
    weights = bare.provenance.files[0]
    weights.touch()
    assert costs.stored(bare) is None, "the weights may be others now"


def broken(entries):
    """Ways in which the file may be no good, each from a good one."""
    (digest,) = entries
    entry = entries[digest]
    return {
        "cut": json.dumps(entries)[:-20],
        "empty": "",
        "a list": "[]",
        "no entry": json.dumps({digest: 3}),
        "an unknown field": json.dumps({digest: {**entry, "unit": "s"}}),
        "a missing field": json.dumps({digest: {"key": entry["key"], "forward": [1.0]}}),
        "another key": json.dumps({digest: {**entry, "key": {}}}),
        "words": json.dumps({digest: {**entry, "forward": ["1"]}}),
        "one number": json.dumps({digest: {**entry, "forward": 1.0}}),
        "not a number": json.dumps({digest: {**entry, "draft": float("nan")}}),
        "a start below 0": json.dumps({digest: {**entry, "start": -1.0}}),
        "negative": json.dumps({digest: {**entry, "forward": [1.0, -1.0]}}),
        "nothing": json.dumps({digest: {**entry, "forward": []}}),
        "deep": "[" * 100_000,
    }


def default(bundle) -> Costs:
    if not is_fused(bundle.trunk):
        return DEFAULT_COSTS
    return VNNI_COSTS if native.status().isa == "avx512vnni" else KERNEL_COSTS


def test_the_kernels_are_asked_for_only_where_a_trunk_runs_on_them(headed, file, monkeypatch):
    monkeypatch.setattr(costs, "is_fused", lambda trunk: False)
    monkeypatch.setattr(native, "status", lambda: pytest.fail("nothing here runs on them"))
    assert costs.in_force(headed)[0] == DEFAULT_COSTS


def test_a_damaged_file_means_default_costs_and_says_so(headed, file, capsys):
    costs.store(headed, SOME)
    for text in broken(json.loads(file.read_text())).values():
        file.write_text(text)
        with pytest.raises(MtplxError, match=r"costs\.json cannot be used.*mtplx tune"):
            costs.stored(headed)
        known, told = costs.in_force(headed)
        assert known == default(headed)
        assert told["from"] == "default"
        assert "mtplx tune" in told["note"]
    result = mtplx.generate(headed, [5, 6], max_tokens=4)
    mtplx.console.summarise(result)
    assert "costs.json cannot be used" in capsys.readouterr().err
    costs.store(headed, SOME)
    assert costs.stored(headed) == SOME, "tuning again repairs it"


def test_a_run_says_by_which_costs_it_chose(headed, file):
    options = {"sampling": GREEDY, "max_tokens": 12, "seed": 1}
    stats = mtplx.generate(headed, [5, 6], **options).stats
    assert (stats.drafter, stats.depth, stats.costs["from"]) == ("auto", "auto", "default")
    assert stats.costs["forward"] == default(headed).forward
    costs.store(headed, SOME)
    stats = mtplx.generate(headed, [5, 6], **options).stats
    tuned = {"from": "tuned", "forward": (1, 1.2, 1.4), "draft": 0.1, "start": 0.2}
    assert stats.to_dict()["costs"] == tuned
    json.dumps(stats.to_dict())
    assert mtplx.generate(headed, [5, 6], depth=2, **options).stats.costs is None
    assert mtplx.generate(headed, [5, 6], draft="none", **options).stats.costs is None


@pytest.mark.skipif(native.status().native is None, reason="the CPU kernels are not built")
def test_weights_that_the_kernels_hold_are_counted(bare, tmp_path):
    """Float32 both times; the kernels x."""
    folder = tiny.write_directory(tmp_path, num_key_value_heads=4)
    sizes = [costs._nbytes(mtplx.load(folder, weights=form)) for form in ("auto", "float32")]
    assert is_fused(mtplx.load(folder).trunk)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
