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


def report(blas: str, model: Path) -> dict:
    done = subprocess.run(
        [sys.executable, str(HERE / "smollm2_worker.py"), blas, str(model)],
        capture_output=True, text=True, timeout=280, check=False, cwd=HERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reference(default_model_path):
    return report("reference", default_model_path)


@pytest.fixture(scope="module")
def default(default_model_path):
    return report("auto", default_model_path)


def assert_covers_everything(cases):
    assert {case["drafter"] for case in cases} == {"ngram", "mtp", "knowing"}
    assert {case["temperature"] for case in cases} == {0.0, 0.6, 1.0}
    assert {case["depth"] for case in cases} == {1, 2, 3, 4, 5}
    for drafter in ("ngram", "knowing"):
        assert sum(case["accepted"] for case in cases if case["drafter"] == drafter) > 10


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
def test_after_a_rejection_at_any_position_the_state_is_a_fresh_prefills(blas, request):
    differences = request.getfixturevalue(blas)["rollback"]
    assert len(differences) == 5
    assert max(differences) < 1e-4, differences
