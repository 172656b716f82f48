"""The model card says what the two files say, and the picture shows the training."""

from __future__ import annotations

import builtins
import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import published
import pytest

from mtplx.errors import ModelFileError, MtplxError
from mtplx.forge import card
from mtplx.forge.plot import plot_training


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    published.write_json(tmp_path / "training.json", published.TRAINING)
    published.write_json(tmp_path / "measurement.json", published.MEASUREMENT)
    published.write_json(tmp_path / "mtp_config.json", published.CONFIG)
    return tmp_path


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in pairs:
            yield from leaves(entry, (*path, key))
    else:
        yield path, value


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return value


def tables(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def numbers(value: Any) -> Iterator[str]:
    """Every number in names and values, as the card writes it."""
    for path, leaf in leaves(value):
        shown = f"{leaf:.4g}" if isinstance(leaf, float) else str(leaf)
        for text in (*map(str, path), shown):
            yield from re.findall(r"[\d.]*\d", text)


def test_front_matter_and_instructions(folder: Path) -> None:
    assert card.write_card(folder) == folder / "README.md"
    text = (folder / "README.md").read_text()
    assert text == card.card(folder)
    start, front, body = text.split("---\n", 2)
    assert start == ""
    assert front.splitlines()[:4] == [
        'license: "apache-2.0"', 'base_model: "someone/tiny-llama"', "library_name: mlx",
        "pipeline_tag: text-generation",
    ]  # fmt: skip
    assert "- multi-token-prediction\n" in front
    for words in (
        "# MTP head for someone/tiny-llama", "mtplx generate", "--model tiny-llama --head ./head",
        "Not exact", "## Limits", "(training.png)", "`mtplx forge eval head`",
        "`mtplx forge train --seed 11 --out head`", "| data: tokens | 655361 |",
        "| temperature | acceptance | acceptance length |", "| 0.6 | 0.785, 0.626, 0.45 | 2.884 |",
        "| extra | - |", "| plan: trunk: model.safetensors | " + "ef" * 32,
        "| machine: cores | 2 |",
    ):  # fmt: skip
        assert words in body, words
    assert {p.name for p in folder.iterdir()} == {
        "training.json",
        "measurement.json",
        "mtp_config.json",
        "README.md",
    }


MEASURED = [path for path, v in leaves(published.MEASUREMENT) if isinstance(v, int | float)]


@pytest.mark.parametrize("path", MEASURED, ids=str)
def test_a_changed_number_changes_the_card(folder: Path, path: tuple[Any, ...]) -> None:
    before = card.card(folder)
    new = changed(published.MEASUREMENT, path, 7.531)
    published.write_json(folder / "measurement.json", new)
    after = card.card(folder)
    assert "7.531" not in before
    assert "7.531" in after


def test_no_number_of_the_tables_is_the_card_s_own(folder: Path) -> None:
    text = card.card(folder)
    known = {*numbers(published.TRAINING), *numbers(published.MEASUREMENT)}
    found = {n for line in tables(text) for n in re.findall(r"[\d.]*\d", line)}
    assert found
    assert found <= known
    # And the prose has none, but what the files say.
    assert set(re.findall(r"[\d.]*\d", text)) <= known


@pytest.mark.parametrize("name", ["training.json", "measurement.json"])
def test_both_files_are_needed(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        card.write_card(folder)
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("training.json", "log", []),
        ("training.json", "license", None),
        ("training.json", "data", "x"),
        ("measurement.json", "figures", {}),
        ("measurement.json", "by_temperature", [1]),
        ("measurement.json", "command", 3),
    ],
)
def test_entries_that_are_needed(folder: Path, name: str, key: str, value: Any) -> None:
    whole = published.TRAINING if name == "training.json" else published.MEASUREMENT
    published.write_json(folder / name, whole | {key: value})
    with pytest.raises(ModelFileError, match=f"{name}: {key} is"):
        card.card(folder)


@pytest.mark.parametrize("name", ["training.json", "measurement.json"])
def test_files_about_other_weights_are_refused(folder: Path, name: str) -> None:
    whole = published.TRAINING if name == "training.json" else published.MEASUREMENT
    published.write_json(folder / name, whole | {"head": "34" * 32})
    with pytest.raises(ModelFileError, match=f"{name} is about another head"):
        card.card(folder)


def test_a_cell_stays_a_cell(folder: Path) -> None:
    machine = {"processor": "a | b\nc"}
    new = published.MEASUREMENT | {"machine": machine}
    published.write_json(folder / "measurement.json", new)
    assert r"| machine: processor | a \| b c |" in card.card(folder)


def test_the_command_writes_it(folder: Path) -> None:
    code = "import sys; sys.argv[0] = 'mtplx'; from mtplx.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "forge", "card", str(folder)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stdout == f"{folder / 'README.md'}\n"
    assert (folder / "README.md").read_text() == card.card(folder)


# The picture


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


@pytest.mark.parametrize("entries", [1, 5])
def test_a_picture_of_a_training(tmp_path: Path, entries: int) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "training.png"
    plot_training(published.TRAINING["log"][:entries], path)
    assert png_size(path) == (1200, 500)
    assert [p.name for p in tmp_path.iterdir()] == ["training.png"]


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MtplxError, match=r"mtplx\[forge\]"):
        plot_training(published.TRAINING["log"], tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
