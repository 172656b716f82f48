"""``mtplx compare``: both streams, one text, and the first difference if there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parent / "mutants"))

from checks import tiny_bundle
from faults import MUTANTS
from patcher import applied

from mtplx import compare
from mtplx.cli import app
from mtplx.sampler_config import SamplerConfig


def compared(capsys, **changes):
    given = {"sampling": SamplerConfig(1.0), "max_tokens": 24, "seed": 3} | changes
    compare.run(tiny_bundle(), "the", **given)
    return capsys.readouterr().out


def test_it_prints_the_text_and_the_figures_of_both(capsys):
    out = compared(capsys)
    for word in ("without drafts (AR)", "with drafts", "tokens/s", "speed-up", "by position"):
        assert word in out
    assert "the same text, token for token" in out


def test_it_names_the_first_difference(capsys):
    fault = next(m for m in MUTANTS if m.name == "the coupled rule races one position on")
    with applied(fault):
        out = compared(capsys)
    assert "first difference at token " in out
    assert "the same text" not in out


def test_on_a_terminal_both_stand_side_by_side(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    out = compared(capsys)
    assert any("without drafts (AR)" in line and "with drafts" in line.split("(AR)")[1]
               for line in out.splitlines())  # fmt: skip


def test_a_side_runs_its_stream_to_the_end():
    side = compare._Side("", compare.stream(tiny_bundle(), "the", max_tokens=5, seed=1))
    while side.running:
        side.step()
    assert len(side.token_ids) == side.stats.tokens == 5


@pytest.mark.parametrize("arguments", [["compare", "the", "-n", "6", "--seed", "2", "-t", "0.5"]])
def test_the_command(arguments, monkeypatch):
    given = {}
    monkeypatch.setattr("mtplx.cli.open_model", lambda *_, **__: tiny_bundle())
    monkeypatch.setattr(compare, "run", lambda bundle, prompt, **how: given.update(how, p=prompt))
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (given["p"], given["max_tokens"], given["seed"]) == ("the", 6, 2)
    assert given["sampling"].temperature == 0.5
