"""The default model: its outputs with drafts are its outputs without, and rollback is exact.

Each BLAS needs a process of its own: it is chosen once, before MLX is imported. The same at length,
on demand: ``scripts/test -m long -s -k smollm2``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

HERE = Path(__file__).parent
NEAR_TIE = 1e-3  # of the race's times, or of two logits when greedy


@pytest.fixture(scope="module")
def reports(default_model_path):
    """What the worker says under either BLAS; both run at the same time."""
    running = {
        blas: subprocess.Popen(
            [sys.executable, str(HERE / "smollm2_worker.py"), choice, str(default_model_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE,
        )
        for blas, choice in (("reference", "reference"), ("default", "auto"))
    }
    try:
        done = {blas: process.communicate(timeout=290) for blas, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    for blas, (_, errors) in done.items():
        assert running[blas].returncode == 0, errors[-3000:]
    return {blas: json.loads(output) for blas, (output, _) in done.items()}


@pytest.fixture
def reference(reports):
    return reports["reference"]


@pytest.fixture
def default(reports):
    return reports["default"]


def assert_covers_everything(cases):
    assert {case["drafter"] for case in cases} == {"ngram", "mtp", "knowing"}
    assert {case["temperature"] for case in cases} == {0.0, 0.6, 1.0}
    assert {case["depth"] for case in cases} == {1, 2, 3, 4, 5}
    for drafter in ("ngram", "knowing"):
        assert sum(case["accepted"] for case in cases if case["drafter"] == drafter) > 5


def test_with_the_reference_blas_every_output_is_plain_decodings(reference):
    assert reference["blas"] in ("reference", "not applicable")
    assert_covers_everything(reference["cases"])
    if reference["blas"] == "reference":
        assert [case for case in reference["cases"] if not case["same"]] == []
    else:
        assert_near_ties(reference["cases"])


def test_with_the_reference_blas_logits_do_not_depend_on_the_rows(reference):
    """Verify-forward logits are AR logits bit for bit, for 1 to 5 drafts."""
    if reference["blas"] != "reference":
        pytest.skip("MLX does not multiply with a BLAS here")
    assert reference["rows"] == [0.0] * 5


def test_with_the_default_blas_a_first_difference_is_a_near_tie(default):
    assert_covers_everything(default["cases"])
    assert_near_ties(default["cases"])
    print(
        f"{default['blas']}: verify rows differ from AR rows by at most {max(default['rows']):.1e}"
    )
    assert max(default["rows"]) < 1e-3


def assert_near_ties(cases):
    for case in cases:
        if not case["same"]:
            print("near-tie:", case)
            assert case["margin"] < NEAR_TIE, case


@pytest.mark.parametrize("blas", ["reference", "default"])
def test_after_a_rejection_at_any_position_the_state_is_a_fresh_prefills(blas, reports):
    differences = reports[blas]["rollback"]
    assert len(differences) == 4
    assert max(differences) < 1e-4, differences


def test_a_request_among_eight_others_is_as_alone(default):
    """One round each in turn: drafts, rules, temperatures, depths and penalties all differ."""
    requests = default["together"]
    assert len(requests) == 9
    assert [request for request in requests if not request["same"]] == []
    assert sum(request["tokens"] > request["rounds"] for request in requests) >= 4
    assert len({request["text"] for request in requests}) == 9


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_on_held_out_prompts_the_reference_blas_gives_plain_decodings_tokens_and_bits(
    default_model_path,
):
    """20 prompts x 3 temperatures, 24 tokens, depths 1 to 5 and drafters in turn."""
    worker = [sys.executable, str(HERE / "smollm2_worker.py")]
    command = [*worker, "reference", str(default_model_path), "long"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    if report["blas"] != "reference":
        pytest.skip("MLX does not multiply with a BLAS here")
    cases = report["cases"]
    total = Counter()
    for case in cases:
        total.update({k: case[k] for k in ("tokens", "same", "accepted", "rows", "equal")})
    print(f"\n  {len(cases)} outputs: {dict(total)}")
    assert {(case["temperature"], case["depth"]) for case in cases} == {
        (t, depth) for t in (0.0, 0.6, 1.0) for depth in (1, 2, 3, 4, 5)
    }
    assert {case["drafter"] for case in cases} == {"ngram", "mtp", "knowing"}
    assert total["tokens"] == 24 * len(cases) == 24 * 60
    assert total["accepted"] > len(cases)
    assert [case for case in cases if not case["same"]] == []
    assert [case for case in cases if case["equal"] != case["rows"]] == []
    assert total["rows"] >= total["tokens"]
