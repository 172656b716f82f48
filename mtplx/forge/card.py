"""The model card of a head: README.md, whose every number comes from the two files beside it.

``training.json`` says how the head was made, ``measurement.json`` what it is worth.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from ..head_file import read_config
from ..provenance import replacing
from ..tokenizer import read_json

CARD, TRAINING, MEASUREMENT, PLOT = (
    "README.md", "training.json", "measurement.json", "training.png",
)  # fmt: skip
_NEEDED: dict[str, dict[str, type]] = {
    TRAINING: {
        "head": str, "command": str, "license": str, "base_model": str, "model": str,
        "data": dict, "plan": dict, "log": list,
    },
    MEASUREMENT: {"head": str, "figures": dict, "by_temperature": dict, "command": str},
}  # fmt: skip

_TEMPLATE = Path(__file__).with_name("card.md")


def card(folder: Path) -> str:
    """The text of the card; ``ModelFileError`` naming a file or an entry that is missing."""
    training, measured = (_read(folder / name) for name in (TRAINING, MEASUREMENT))
    for name, found in ((TRAINING, training), (MEASUREMENT, measured)):
        if found["head"] != read_config(folder).sha256:
            raise ModelFileError(f"{folder / name} is about another head", path=folder / name)
    apart = {"command", "license", "base_model", "model", "log", "head"}
    shown = {"figures", "by_temperature", "command", "notes", "head"}
    return _TEMPLATE.read_text(encoding="utf-8").format(
        license=json.dumps(training["license"].lower()),
        base_model=json.dumps(training["base_model"]),
        name=training["base_model"],
        model=training["model"],
        temperatures=_by_temperature(measured["by_temperature"]),
        figures=_fields(measured["figures"], ("figure", "value")),
        measured_by=measured["command"],
        measured_with=_fields({k: v for k, v in measured.items() if k not in shown}),
        notes="".join(f"\n- {_line(note)}" for note in measured.get("notes", [])) + "\n",
        plot=PLOT,
        trained_by=training["command"],
        training=_fields({k: v for k, v in training.items() if k not in apart}),
        last=_fields(training["log"][-1]),
    )


def write_card(folder: Path) -> Path:
    """Write ``card`` as README.md."""
    text = card(folder)
    with replacing(folder / CARD) as new:
        new.write_text(text, encoding="utf-8")
    return folder / CARD


def _read(file: Path) -> dict[str, Any]:
    found = read_json(file)
    for key, kind in _NEEDED[file.name].items():
        if not found.get(key) or not isinstance(found[key], kind):
            raise ModelFileError(f"{file}: {key} is {found.get(key)!r}", path=file)
    return found


def _by_temperature(rows: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    body = [[t, *(_shown(row.get(key)) for key in columns)] for t, row in rows.items()]
    return _table(["temperature", *(key.replace("_", " ") for key in columns)], body)


def _fields(value: Mapping[str, Any], head: Sequence[str] = ("", "")) -> str:
    return _table(head, _flat(value))


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[list[str]]:
    """(name, value) of every entry, those of nested objects after the name of theirs."""
    for key, entry in value.items():
        name = f"{before}{key.replace('_', ' ')}"
        if isinstance(entry, dict):
            yield from _flat(entry, f"{name}: ")
        else:
            yield [name, _shown(entry)]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def _line(text: str) -> str:
    return " ".join(text.split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([_line(cell).replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
