"""A head's directory, complete, with made-up figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import heads
import tiny

from mtplx import head_file
from mtplx.forge.card import write_card
from mtplx.load import load

HEAD = "12" * 32
CONFIG: dict[str, Any] = {
    "format": 1, "model_type": "llama", "hidden_size": 64, "vocab_size": 320, "norm_eps": 1e-5,
    "embedding_first": True, "levels": [], "copy_bonus": [], "draft_ids": None,
    "trunk": {"model.safetensors": {"bytes": 1, "sha256": "ef" * 32}}, "sha256": HEAD,
    "mtplx": "0",
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "head": HEAD,
    "command": "mtplx forge train --seed 11 --out head",
    "license": "Apache-2.0",
    "base_model": "someone/tiny-llama",
    "model": "tiny-llama",
    "plan": {
        "data": {"seed": 13, "levels": []},
        "train": {"seed": 17, "steps": 1501, "unroll_from": 0.8123, "levels": [2, 4]},
        "prompts": {"chat.jsonl": "cd" * 32},
        "trunk": {"model.safetensors": "ef" * 32},
    },
    "data": {"sha256": "ab" * 32, "tokens": 655361, "coverage": 0.98765},
    "seconds": 2345.67,
    "machine": {"processor": "Abacus 9000", "cores": "2"},
    "versions": {"python": "3.19", "mlx": "0.99.9"},
    "log": [
        {
            "step": 50 * i, "depth": 1 if i < 3 else 3, "training_loss": 3.5 - 0.31 * i,
            "held_out_loss": 3.6 - 0.29 * i, "seconds": 77.7 * i,
            "held_out_acceptance": [0.41 + 0.04 * i, 0.29 + 0.03 * i, 0.19 + 0.02 * i],
        }
        for i in range(1, 6)
    ],
}  # fmt: skip
MEASUREMENT: dict[str, Any] = {
    "head": HEAD,
    "figures": {"acceptance_length": 2.437, "speed_vs_ar": 1.683, "extra": None},
    "by_temperature": {
        t: {
            "acceptance": [0.812 - d, 0.653 - d, 0.477 - d], "acceptance_length": 2.911 - d,
            "tokens_per_second": 91.3 - d, "ar_tokens_per_second": 53.9 - d, "speed": 1.694 - d,
        }
        for t, d in (("0", 0.0), ("0.6", 0.027), ("1", 0.081))
    },
    "command": "mtplx forge eval head",
    "machine": {"processor": "Abacus 9000", "cores": "2", "threads": "2"},
    "versions": {"python": "3.19", "mlx": "0.99.9"},
    "prompts": {"mt-bench": 12, "tokens_each": 64},
    "notes": ["prompt 3 differs"],
}  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_folder(root: Path) -> Path:
    """All six files."""
    folder = root / "head"
    bundle = load(tiny.write_directory(root / "trunk"))
    heads.write(folder, bundle, ids=range(64))
    head = {"head": head_file.read_config(folder).sha256}
    write_json(folder / "training.json", TRAINING | head)
    write_json(folder / "measurement.json", MEASUREMENT | head)
    (folder / "training.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    write_card(folder)
    assert head_file.read_config(folder).draft_ids == 64
    return folder
