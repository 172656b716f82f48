"""The benchmarks of the MTP head, on a tiny model with a random head."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_measure import bundle

from mtplx import bench, heldout
from mtplx.api import encode_prompt, generate
from mtplx.bench import copy, exactness, mtp
from mtplx.bench.report import Report
from mtplx.errors import MtplxError, RequestError
from mtplx.sampler_config import SamplerConfig

__all__ = ["bundle"]
DOC = Path(__file__).parent.parent / "docs" / "exactness.md"


@pytest.fixture
def short(monkeypatch):
    """Few prompts, few tokens, nothing fetched."""
    texts = {"mt-bench": ["one a b", "two", "three"], "humaneval": ["def f", "def g"]}
    monkeypatch.setattr(heldout, "prompts", lambda name: texts[name])
    monkeypatch.setattr(copy, "COPY_PROMPTS", ("say a a a a", "say b c d"))
    monkeypatch.setattr(copy, "MAX_TOKENS", 10)
    monkeypatch.setattr(copy, "MAX_REPEATED", 1.0)
    for module in (mtp, exactness):
        monkeypatch.setattr(module, "_TOKENS", 8)
        monkeypatch.setattr(module, "_EACH", 1)
    monkeypatch.setattr(mtp, "_FEW", 1)


def run(name: str, bundle, **options) -> Report:
    return bench.run(name, open_model=lambda *_: bundle, **options)


@pytest.mark.usefixtures("short")
def test_mtp_has_all_figures(bundle):
    report = run("mtp", bundle)
    figures = json.loads(json.dumps(report.to_dict()))["figures"]
    for name in (
        "acceptance_1_t06", "accept_len_k3_t06", "accept_len_k3_t0", "accept_len_k3_t1",
        "speed_vs_ar_t06", "speed_vs_ar_copy", "auto_vs_best_fixed", "round_overhead",
        "greedy_identical", "draft_vocabulary_speed", "tokens_per_second_t06",
    ):  # fmt: skip
        assert figures[name] is not None, name
    assert figures["greedy_identical"] == 1.0
    assert figures["prompts"] == 2
    assert all(1 <= figures[f"accept_len_k3_{t}"] <= 4 for t in ("t0", "t06", "t1"))
    assert report.command == "mtplx bench mtp --json"
    assert any("token rule" in note for note in report.notes)
    shown = report.markdown()
    assert shown.splitlines()[:2] == ["| figure | value |", "| --- | ---: |"]
    assert report.machine["processor"] in shown


@pytest.mark.usefixtures("short")
def test_full_takes_all_prompts(bundle):
    report = run("mtp", bundle, full=True)
    assert report.figures["prompts"] == 5
    assert report.command == "mtplx bench mtp --full --json"


def test_ratios_are_of_the_right_sides(bundle, monkeypatch):
    """Depth 3 is the best fixed one; the head's own vocabulary is twice as fast as all ids."""
    asked: list[tuple[str, str]] = []

    def side_by_side(ways, prompts, sampling, *, rule, **_):
        speeds = {"0": 9.0, "6": 8.0, "1": 10.0, "2": 20.0, "3": 40.0, "4": 30.0, "auto": 36.0}
        out = {}
        for name, way in ways.items():
            asked.append((way.draft, rule))
            speed = speeds[str(way.depth)] / (2 if way.bundle.head.vocabulary is None else 1)
            out[name] = [SimpleNamespace(tokens_per_second=speed)]
        return out

    monkeypatch.setattr(mtp, "side_by_side", side_by_side)
    monkeypatch.setattr(mtp, "summed", lambda outputs: outputs[0])
    found = mtp._depths(bundle, ["a"], lambda: None)
    assert found["auto_vs_best_fixed"] == pytest.approx(0.9)
    assert found["tokens_per_second_depth_3"] == 40.0
    assert mtp._without(bundle, "vocabulary", None, ["a"], lambda: None) == pytest.approx(2.0)
    assert bundle.head.vocabulary is not None
    assert set(asked) == {("mtp", "coupled")}


def test_all_ways_with_the_coupled_rule_write_the_same(bundle, monkeypatch):
    seen = []
    real = mtp.side_by_side

    def spy(*arguments, **options):
        seen.append(real(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(mtp, "side_by_side", spy)
    monkeypatch.setattr(mtp, "_TOKENS", 8)
    mtp._depths(bundle, ["a", "b"], lambda: None)
    mtp._without(bundle, "vocabulary", None, ["a", "b"], lambda: None)
    outputs = [[output.token_ids for output in way] for found in seen for way in found.values()]
    assert len(outputs) == 9
    assert all(way == outputs[0] for way in outputs)


def test_without_a_reduced_vocabulary_there_is_nothing_to_compare(bundle):
    assert mtp._without(replace(bundle, head=None), "vocabulary", None, ["a"], lambda: None) is None
    assert mtp._without(bundle, "copy_bonus", (), ["a"], lambda: None) is None


def test_an_output_that_differs_is_counted_and_named(bundle):
    greedy = SamplerConfig(temperature=0.0)
    prompts = ["a", "b"]
    plain = [
        generate(bundle, encode_prompt(bundle, p), sampling=greedy, max_tokens=4, draft="none")
        for p in prompts
    ]
    wrong = replace(plain[1], token_ids=[*plain[1].token_ids[:2], 7, 7])
    outputs = {"ar": plain, "k3": [plain[0], wrong], "auto": plain}
    notes: list[str] = []
    assert mtp._identical(bundle, prompts, outputs, notes) == 0.5
    assert len(notes) == 1
    assert "prompt 2, T = 0, k3" in notes[0]
    assert "NOT a near-tie" in notes[0]


@pytest.mark.usefixtures("short")
def test_the_grid(bundle):
    report = run("exactness", bundle)
    lines = report.table().splitlines()
    assert len(lines) == 2 + 15
    assert lines[0].startswith("| T | top-p | acceptance at position 1 |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert len(report.figures) == 15 * 5
    for p in ("p05", "p095", "p1"):
        assert report.figures[f"acceptance_1_t0_{p}"] == report.figures["acceptance_1_t0_p1"]
        assert 1 <= report.figures[f"acceptance_length_t15_{p}"] <= 4
        assert report.figures[f"speed_vs_ar_t03_{p}"] > 0
    assert report.command == "mtplx bench exactness --json"


@pytest.mark.usefixtures("short")
def test_a_plot_needs_matplotlib_and_a_place_and_says_so_first(bundle, monkeypatch, tmp_path):
    def never(*_):
        raise AssertionError("decoded before the options were checked")

    monkeypatch.setattr(exactness, "side_by_side", never)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MtplxError, match=r"mtplx\[forge\]"):
            run("exactness", bundle, plot=tmp_path / "x.png")
    monkeypatch.setattr(exactness, "figure_class", lambda: None)
    with pytest.raises(RequestError, match="no directory"):
        run("exactness", bundle, plot=tmp_path / "none" / "x.png")


@pytest.mark.usefixtures("short")
def test_a_plot_is_a_png(bundle, tmp_path):
    pytest.importorskip("matplotlib")
    report = run("exactness", bundle, plot=tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert report.command == f"mtplx bench exactness --plot {tmp_path / 'x.png'} --json"


def test_the_document_has_the_table_of_the_command():
    text = DOC.read_text()
    _, marker, rest = text.partition("<!-- grid -->\n")
    if not marker:
        pytest.skip("the grid has not been measured yet")
    assert "](exactness.png)" in text
    table = [line for line in rest.splitlines() if line.startswith("|")]
    figures = dict.fromkeys(
        (exactness._key(name, t, p) for name in exactness._SHOWN
         for t in exactness.TEMPERATURES for p in exactness.TOP_P), 1.0
    )  # fmt: skip
    shape = exactness.Grid("exactness", figures).table().splitlines()
    assert table[:2] == shape[:2]
    assert [row.split("|")[1:3] for row in table] == [row.split("|")[1:3] for row in shape]


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("copy", {"full": True}, "--full"),
        ("mtp", {"plot": Path("x.png")}, "--plot"),
        ("law", {"full": True}, "--full"),
        ("blas", {"model": "x"}, "--model"),
    ],
)
def test_no_option_is_ignored(name, options, word):
    with pytest.raises(RequestError, match=f"{word} has no use in bench {name}"):
        run(name, None, **options)


@pytest.mark.parametrize("name", ["mtp", "exactness"])
@pytest.mark.usefixtures("short")
def test_a_model_without_a_head_is_refused(name, bundle):
    with pytest.raises(RequestError, match="MTP head"):
        run(name, replace(bundle, head=None))
