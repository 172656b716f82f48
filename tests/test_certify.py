"""The certificate: verdicts, what it holds, its report and exit codes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parent / "mutants"))

from checks import tiny_bundle
from family_cases import CASES
from family_cases.case import write_rest
from faults import MUTANTS
from patcher import applied
from safetensors.numpy import save_file

import mtplx
from mtplx.certify import certificate, report, run, tuples
from mtplx.certify.cases import BLOCKS
from mtplx.certify.engine_play import REQUESTS
from mtplx.certify.tuples import chi_square, law_of_tuples
from mtplx.cli import app
from mtplx.errors import RequestError
from mtplx.fetch import file_sha256

PARTS = {"joint_law_tv", "seed_replay", "e_process", "chi_square", "drift"}


@pytest.fixture
def small(monkeypatch):
    """A certificate in seconds: two cases of each kind, few tuples."""
    monkeypatch.setattr(run, "BLOCKS", {n: BLOCKS[n] for n in ("zeros", "three tokens, K = 2")})
    monkeypatch.setattr(run, "REQUESTS", {n: REQUESTS[n] for n in ("plain", "grammar")})
    monkeypatch.setattr(run, "_TUPLES", 30)


def certified(**changes):
    given = {"delta": 0.3, "prompts": ["the", "a"], "seed": 5, "minutes": 3.0} | changes
    return run.certify(tiny_bundle(), **given)


def test_a_correct_engine_is_certified(small, tmp_path):
    shares = []
    found = certified(say=lambda share, what: shares.append(share))
    assert (found.verdict, found.refuted_by, found.open_questions) == ("certified", [], [])
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told.keys() >= PARTS | {
        "verdict", "alpha", "delta", "law", "seed", "rules", "model", "device", "machine",
        "versions", "level_of_each_test",
    }  # fmt: skip
    assert told["joint_law_tv"] <= 1e-12
    assert told["seed_replay"]["runs"] == 6
    replay = told["seed_replay"]
    assert replay["identical"] + replay["near_ties"] == 6
    assert told["e_process"]["tokens"] == sum(
        r["tokens"] for r in told["e_process"]["rules"].values()
    )
    assert told["e_process"]["wealth_against_leak"] >= 1 / found.level
    assert told["level_of_each_test"] == pytest.approx(1e-3 / 6)
    assert told["drift"]["positions"] > 0
    assert len(told["model"]["sha256"]) == 1
    assert 0 <= min(shares) <= max(shares) <= 1
    assert shares == sorted(shares)
    pytest.importorskip("matplotlib")
    data, page = report.write(found, tmp_path / "new")
    assert json.loads(data.read_text()) == told
    assert page.read_bytes()[:4] == b"\x89PNG"
    assert any("seed replay" in line for line in report.lines(found))


@pytest.mark.parametrize(
    ("fault", "rule", "words"),
    [
        ("every possible draft is kept", "token", ("joint law",)),
        ("the coupled rule's last token by other noise", "coupled", ("coupled outputs",)),
        ("penalties as at the block's start", "token", ()),
    ],
)
def test_a_wrong_engine_is_refuted(small, fault, rule, words, monkeypatch):
    if not words:
        monkeypatch.setattr(run, "REQUESTS", {"penalties": REQUESTS["penalties"]})
        words = ("penalties",)
    with applied(next(m for m in MUTANTS if m.name == fault)):
        found = certified(rules=[rule], minutes=0.5)
    assert found.verdict == "refuted"
    for word in words:
        assert any(word in line for line in found.refuted_by), found.refuted_by


def test_what_there_was_no_time_for_is_open(small):
    found = certified(minutes=1e-6)
    assert found.verdict == "inconclusive"
    assert len(found.open_questions) >= 3
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompts": []}, {"prompts": ["a", " "]}, {"rules": []}, {"rules": ["typical"]},
        {"alpha": 0.0}, {"delta": 0.6}, {"minutes": 0.0},
    ],
)  # fmt: skip
def test_parameters_are_checked(wrong):
    with pytest.raises(RequestError, match="certify"):
        certified(**wrong)


# --- chi-square ---------------------------------------------------------------------------------


def test_chi_square_merges_what_expects_too_little():
    law = {(0,): 0.5, (1,): 0.4, (2,): 0.06, (3,): 0.04}
    found = chi_square({(0,): 25, (1,): 20, (2,): 5}, law)
    assert (found.runs, found.bins) == (50, 3)
    assert found.statistic == pytest.approx(0.0, abs=1e-12)
    assert found.p_value == 1.0
    found = chi_square({(0,): 35, (1,): 10, (2,): 3, (3,): 2}, law)
    assert found.statistic == pytest.approx(100 / 25 + 100 / 20)
    assert found.p_value == pytest.approx(math.exp(-9 / 2), rel=0.3)  # two degrees of freedom


def test_chi_square_of_what_the_law_does_not_have():
    assert chi_square({(0,): 50, (7,): 1}, {(0,): 0.5, (1,): 0.5}).p_value == 0.0


def test_p_values_of_a_correct_sampler_are_spread_evenly():
    generator = np.random.default_rng(3)
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    law = {(i,): p for i, p in enumerate(probs)}
    values = []
    for _ in range(60):
        drawn = generator.multinomial(100, probs)
        values.append(chi_square({(i,): int(n) for i, n in enumerate(drawn)}, law).p_value)
    assert 0.35 < np.mean(values) < 0.65


def test_the_law_of_tuples_is_a_law_and_ends_at_an_end():
    bundle = tiny_bundle()
    law = law_of_tuples(bundle, [5, 6])
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    ends = bundle.tokenizer.eos_ids
    assert all(len(cell) == tuples.LENGTH or cell[-1] in ends for cell in law)
    assert len(law) > 9


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "code"), [("certified", 0), ("refuted", 3), ("inconclusive", 4)]
)
def test_exit_codes(verdict, code, monkeypatch, tmp_path):
    found = certificate.Certificate(
        tiny_bundle(),
        ("token",),
        1e-3,
        0.05,
        run.SamplerConfig(),
        1,
        joint_laws={"token": {"a": 0.0}},
    )
    monkeypatch.setattr(certificate.Certificate, "verdict", verdict)
    given = {}
    monkeypatch.setattr(run, "run", lambda bundle, **how: given.update(how) or found)
    monkeypatch.setattr("mtplx.certify_cli.open_model", lambda *_, **__: tiny_bundle())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    command = [
        "certify",
        "--json",
        "--prompts",
        str(prompts),
        "--verify",
        "token",
        "--delta",
        "0.1",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == code
    assert json.loads(done.stdout)["verdict"] == verdict
    assert (given["prompts"], given["rules"], given["delta"]) == (["one", "two"], ["token"], 0.1)


@pytest.mark.parametrize("where", ["model.safetensors", "mtp.safetensors"])
def test_a_certificate_names_the_head_of_the_models_own(where, tmp_path, monkeypatch):
    case = CASES["mimo_1"]
    weights = case.weights()
    parts = {"model.safetensors": {}, where: {}}
    for name, value in weights.items():
        parts[where if case.is_head(name) else "model.safetensors"][name] = value
    for file, arrays in parts.items():
        save_file(arrays, tmp_path / file, {"format": "pt"})
    write_rest(tmp_path, case.config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mtp.safetensors").write_bytes(b"another's")
    monkeypatch.chdir(tmp_path)
    bundle = mtplx.load(tmp_path, weights="float32")
    model = certificate._model(bundle)
    assert model["head"] == {"source": "model", "sha256": None}
    assert model["sha256"] == {file: file_sha256(tmp_path / file) for file in parts}
    assert report._head(model["head"]) == "the model's own"
