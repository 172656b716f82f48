"""The README tells the truth: its Python runs, its commands exist, its files are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.S | re.M)


def _blocks(language: str) -> list[str]:
    return [body for kind, body in BLOCKS if kind == language]


def _options_of(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "mtplx.cli", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
    ).stdout


@pytest.mark.model
@pytest.mark.parametrize("code", _blocks("python"))
def test_python_blocks_run(code, default_model_path):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_there_are_python_and_shell_blocks():
    assert _blocks("python")
    assert _blocks("sh")


@pytest.mark.parametrize("line", [ln for body in _blocks("sh") for ln in body.splitlines() if ln])
def test_shell_lines_name_what_exists(line):
    words = line.split("#")[0].split()
    if words[0].startswith("scripts/"):
        assert (ROOT / words[0]).is_file()
        assert (ROOT / words[0]).stat().st_mode & 0o111
    elif words[0] == "mtplx":
        shown = _options_of(*words[1 : 3 if words[1] == "forge" else 2])
        for option in re.findall(r"(?<=\s)--[a-z-]+", line):
            assert option in shown
    else:
        assert words[0] in ("git", "cd", "pip", "rm", "MTPLX_THREADS=1")


def test_files_and_links_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_it_names_what_it_must():
    for words in ("multi-token prediction", "Memory-Token-Projection", "Apache-2.0", "not there"):
        assert words in README
