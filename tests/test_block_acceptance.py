"""The block rule keeps at least as many drafts as the token rule, on laws of the default model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

HERE = Path(__file__).parent


def test_block_keeps_at_least_as_many_drafts_as_token(default_model_path):
    command = [sys.executable, str(HERE / "block_worker.py"), str(default_model_path), "60"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=290, cwd=HERE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for temperature, found in json.loads(done.stdout).items():
        for name in ("run", "redrawn"):
            token, block = (1 + kept for kept in found[name])
            print(
                f"T = {temperature}, {found['blocks']} blocks of 4, {name}: acceptance length"
                f" {token:.3f} (token), {block:.3f} (block), {block / token - 1:+.1%}"
            )
        assert found["blocks"] > 30
        assert found["redrawn"][1] >= found["redrawn"][0]
