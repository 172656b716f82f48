"""The default model: its outputs with drafts are its outputs without, and rollback is exact.

Each BLAS needs a process of its own: it is chosen once, before MLX is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
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
