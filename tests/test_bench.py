"""Benchmarks: what they count, and that each prints its one object."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import test_blas
import tiny

from mtplx import bench, load
from mtplx.agreement import NEAR_TIE, difference, first_difference
from mtplx.api import encode_prompt, generate
from mtplx.bench import blas, copy, law
from mtplx.bench.report import Report, alternate
from mtplx.errors import BlasError, RequestError
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return load(tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4], 0.0),
        ([1, 1, 1, 1, 1], 0.5),
        (list(range(40)), 0.0),
        ([1, 2, 3, 4] * 10, 1 - 4 / 37),
    ],
)
def test_the_share_of_repeated_4grams(ids, share):
    assert copy.repeated_share(ids) == pytest.approx(share)


def test_calls_take_turns():
    seen: list[str] = []
    times = alternate([lambda: seen.append("a"), lambda: seen.append("b")], 3)
    assert "".join(seen) == "ab" + "ababab"
    assert len(times) == 2


def _check_object(report: Report) -> None:
    found = json.loads(json.dumps(report.to_dict()))
    assert {"name", "figures", "command", "versions", "machine"} <= set(found)
    assert found["versions"]["mlx"]
    assert "BLAS" in found["machine"]["blas"]
    for value in found["figures"].values():
        assert value is None or np.isfinite(value)


def test_law_measures_a_law_that_is_right(monkeypatch):
    monkeypatch.setattr(law, "VOCABULARY", 4096)
    monkeypatch.setattr(law, "_REPEATS", 2)
    report = law.run()
    _check_object(report)
    assert report.figures["largest_error_in_p"] < 1e-6
    assert report.figures["law_vs_mlx_lm"] > 0


def test_copy_compares_equal_outputs_and_leaves_loops_out(monkeypatch, bundle):
    monkeypatch.setattr(copy, "COPY_PROMPTS", ("say a a a a", "say b c d"))
    monkeypatch.setattr(copy, "MAX_TOKENS", 24)
    monkeypatch.setattr(copy, "_AR_REPEATS", 1)
    monkeypatch.setattr(copy, "_AR_TOKENS", 6)
    report = bench.run("copy", model="tiny", blas="auto", open_model=lambda *_: bundle)
    _check_object(report)
    assert report.figures["identical_outputs_t0"] == 1.0
    assert report.figures["identical_outputs_t06"] == 1.0
    monkeypatch.setattr(copy, "MAX_REPEATED", -1.0)
    report = bench.run("copy", model="tiny", blas="auto", open_model=lambda *_: bundle)
    assert report.figures["prompts_counted_t0"] == 0
    assert report.figures["speed_vs_ar_copy_t0"] is None
    assert any("left out" in note for note in report.notes)


def test_the_command_is_what_was_asked_for_and_no_option_is_ignored(monkeypatch):
    monkeypatch.setattr(law, "VOCABULARY", 64)
    monkeypatch.setattr(law, "_REPEATS", 1)
    run = partial(bench.run, open_model=lambda *_: None)
    assert run("law", model=None, blas="auto").command == "mtplx bench law --json"
    found = run("law", model=None, blas="reference").command
    assert found == "mtplx bench law --blas reference --json"
    with pytest.raises(RequestError, match="--model"):
        run("law", model="x", blas="auto")
    with pytest.raises(RequestError, match="--blas"):
        run("blas", model=None, blas="reference")


@pytest.mark.skipif(bool(test_blas.available()), reason="no OpenBLAS here")
def test_products_are_measured_on_both_sides(monkeypatch):
    monkeypatch.setattr(blas, "_ROUNDS", 1)
    report = blas.run()
    assert report.figures["matmul_vs_stock"] > 0
    assert "openblas" in report.machine["blas"]


def test_a_process_that_does_not_start_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(blas, "_WORKER", "raise SystemExit('no luck')")
    with pytest.raises(BlasError, match="no luck"):
        blas.run()


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_difference_has_the_margin_that_would_swap_the_tokens(bundle):
    """Greedy: the distance of two logits, read from the trunk itself."""
    prompt = encode_prompt(bundle, "hello")
    greedy = SamplerConfig(temperature=0.0)
    ids = generate(bundle, prompt, sampling=greedy, max_tokens=3, draft="none").token_ids
    import mlx.core as mx

    logits = np.asarray(bundle.trunk(mx.array([[*prompt, *ids[:2]]])))[0, -1].astype(np.float64)
    order = np.argsort(-logits)
    other = [*ids[:2], int(order[1])]
    found = difference(bundle, prompt, ids, other, sampling=greedy, seed=1)
    assert found is not None
    assert found.position == 2
    assert found.margin == pytest.approx(logits[order[0]] - logits[order[1]], abs=1e-4)
    assert "near-tie" in str(found)
    assert ("NOT" in str(found)) == (found.margin >= NEAR_TIE)
    assert difference(bundle, prompt, ids, list(ids), sampling=greedy, seed=1) is None
    ended = difference(bundle, prompt, ids, ids[:2], sampling=greedy, seed=1)
    assert ended is not None
    assert ended.margin is None


def test_a_token_outside_the_support_is_said_to_be_at_its_edge(bundle):
    prompt = encode_prompt(bundle, "hello")
    sampling = SamplerConfig(temperature=1.0, top_k=2, top_p=1.0)
    import mlx.core as mx

    logits = np.asarray(bundle.trunk(mx.array([prompt])))[0, -1].astype(np.float64)
    law = distribution_from_logits(logits, sampling)
    inside, outside = int(np.argmax(law)), int(np.argmin(logits))
    found = difference(bundle, prompt, [inside], [outside], sampling=sampling, seed=1)
    assert found is not None
    assert found.margin is None
    assert "outside the support" in str(found)
