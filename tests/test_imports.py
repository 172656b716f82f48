"""Imports point one way, heavy packages stay where they belong, files and functions stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "mtplx"

# The one table: a module may import modules of earlier rows only, and a package its own. A new
# module gets its name into the row after the last one it needs.
ROWS = (
    ("errors",),
    ("blas", "storage"),
    ("native",),
    ("sampler_config", "distribution", "metrics", "text", "installer", "progress", "depth"),
    (
        "penalties",
        "constraints",
        "draft_vocabulary",
        "options",
        "gguf",
        "detokenizer",
        "chat",
    ),
    ("sampling", "rng", "gguf_llama", "tokenizer", "environment"),
    ("verify", "checkpoint", "grammar", "logprobs"),
    ("hub",),
    ("fetch",),
    ("provenance", "heldout"),
    ("device",),  # from here on MLX
    ("fast_sampling",),
    ("strict", "precision", "cpu_cache", "recurrent"),
    ("families",),
    ("native_head", "state"),
    ("mtp_patch",),
    ("cpu_layers",),
    ("cpu_head", "head_file"),
    ("load",),
    ("drafters",),
    ("sequence",),
    ("engine",),
    ("costs",),
    ("api", "inspection", "convert"),
    ("agreement", "measure"),
    ("certify", "bench", "forge", "server"),
    ("console",),
    ("arguments",),
    ("compare", "forge_cli", "certify_cli"),
    ("cli",),
    ("__main__", "__init__"),
)
RANK = {module: i for i, row in enumerate(ROWS) for module in row}

# Who may import what from outside; anything not named here is free.
FIRST_WITH_MLX = RANK["device"]
HTTP = {"http", "socketserver", "wsgiref", "aiohttp", "fastapi", "starlette", "uvicorn", "flask"}
OUTSIDE = {
    # bench compares with it
    "mlx_lm": {
        "families",
        "mtp_patch",
        "cpu_cache",
        "convert",
        "cpu_layers",
        "load",
        "precision",
        "recurrent",
        "state",
        "bench",
    },
    **{package: {"server"} for package in HTTP},
}
WITHOUT_MLX = ("errors", "sampler_config", "distribution", "penalties", "sampling", "rng", "verify")

# Reading these while a module is imported would make it depend on where it is imported.
SURROUNDINGS = {
    "os": {"environ", "environb", "getenv", "getenvb", "uname", "name"},
    "sys": {"platform", "getwindowsversion"},
    "platform": None,  # anything
}

MAX_FILE, MAX_FUNCTION = 400, 60
# Of the part that runs when text is generated (DESIGN's bound), and of each of the others: what
# brings models here, what reads and writes their files, all families together, and the tools.
MAX_CORE, MAX_PART = 8000, 2000
PARTS = {
    "download": ("fetch", "hub", "installer", "storage"),
    "files": (
        "checkpoint",
        "convert",
        "gguf",
        "gguf_llama",
        "head_file",
        "inspection",
        "native_head",
        "provenance",
        "strict",
    ),
    **{name: (name, f"{name}_cli") for name in ("bench", "certify", "families", "forge", "server")},
}

FILES = sorted(ROOT.rglob("*.py"))


def group(path: Path) -> str:
    """The row entry that a file belongs to: its module, or the package it is part of."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path):
    """(line, absolute dotted name) of every import statement, those inside functions included."""
    package = ["mtplx", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"


def wrong_imports(source: str, path: Path) -> list[str]:
    own = group(path)
    if own not in RANK:
        return [f"{path}: {own!r} has no row in this test's table"]
    wrong = []
    for line, name in imports(ast.parse(source), path):
        where = f"{path.relative_to(ROOT)}:{line}"
        top, _, rest = name.partition(".")
        if top == "mtplx":
            other = rest.partition(".")[0]
            if other not in RANK and (ROOT / f"{other}.py").exists():
                wrong.append(f"{where}: {other!r} has no row in this test's table")
            elif RANK.get(other, -1) >= RANK[own] and other != own:
                wrong.append(f"{where}: {own} must not import {other}")
        elif top == "mlx" and RANK[own] < FIRST_WITH_MLX:
            wrong.append(f"{where}: {own} must not import MLX")
        elif own not in OUTSIDE.get(top, {own}):
            wrong.append(f"{where}: {own} must not import {top}")
    return wrong


def at_import(tree: ast.Module):
    """Every node that runs when the module is imported: not the bodies of functions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            waiting += [*node.decorator_list, *arguments.defaults]
            waiting += [d for d in arguments.kw_defaults if d is not None]
        elif isinstance(node, ast.Lambda):
            waiting += node.args.defaults
        else:
            waiting += ast.iter_child_nodes(node)


def surroundings_read(source: str) -> list[str]:
    found = []
    for node in at_import(ast.parse(source)):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [(node.value.id, node.attr)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(str(node.module), alias.name) for alias in node.names]
        for module, name in names:
            if module in SURROUNDINGS:
                wanted = SURROUNDINGS[module]
                if wanted is None or name in wanted:
                    found.append(f"line {node.lineno}: {module}.{name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_arrows(path):
    assert wrong_imports(path.read_text(), path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_reads_its_surroundings_at_import(path):
    assert surroundings_read(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


def test_the_package_is_short():
    part_of = {module: part for part, modules in PARTS.items() for module in modules}
    lines = Counter()
    for path in FILES:
        lines[part_of.get(group(path), "core")] += len(path.read_text().splitlines())
    assert lines.pop("core") < MAX_CORE
    assert all(count < MAX_PART for count in lines.values()), lines


BLOCKED = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "mlx_lm"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
importlib.import_module(sys.argv[1])
assert not [m for m in sys.modules if m.partition(".")[0] in ("mlx", "mlx_lm")]
"""


@pytest.mark.parametrize("module", WITHOUT_MLX)
def test_the_law_imports_without_mlx(module):
    command = [sys.executable, "-c", BLOCKED, f"mtplx.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_block_blocks():
    command = [sys.executable, "-c", BLOCKED, "mtplx.fast_sampling"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "mlx.core was imported" in done.stderr or "mlx was imported" in done.stderr


# --- the checks see what they should ----------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("sampling.py", "from .rng import race"),
        ("sampling.py", "from mtplx.engine import step"),
        ("sampling.py", "def f():\n    from . import verify"),
        ("errors.py", "import mtplx.sampling"),
        ("rng.py", "import mlx.core as mx"),
        ("rng.py", "def f():\n    from mlx import core"),
        ("verify/token.py", "from ..fast_sampling import x"),
        ("verify/token.py", "from ..engine import x"),
        ("engine.py", "from mlx_lm.models import llama"),
        ("engine.py", "import http.server"),
        ("drafters/ngram.py", "from .. import engine"),
        ("novel.py", "import os"),
    ],
)
def test_a_wrong_arrow_is_seen(file, source):
    assert len(wrong_imports(source, ROOT / file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("verify/token.py", "from .verdict import Verdict\nfrom ..sampling import accepts"),
        ("verify/__init__.py", "from .token import verify_token"),
        ("engine.py", "from . import __version__\nfrom .verify import verify\nimport mlx.core"),
        ("state.py", "from mlx_lm.models import cache"),
        ("server/app.py", "import http.server\nfrom ..engine import step"),
    ],
)
def test_a_right_arrow_is_not(file, source):
    assert wrong_imports(source, ROOT / file) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import os\nX = os.environ.get('A')", 1),
        ("import os\nif os.getenv('A'):\n    pass", 1),
        ("import sys\nclass A:\n    x = sys.platform", 1),
        ("import platform\ndef f(x=platform.system()):\n    pass", 1),
        ("from os import environ", 1),
        ("import os\nA = [os.environ[x] for x in 'ab']", 1),
        ("import os\ndef f():\n    return os.environ", 0),
        ("import os\nf = lambda: os.environ", 0),
        ("import os\nX = os.sep", 0),
        ("import platform", 0),
    ],
)
def test_surroundings_are_seen(source, count):
    assert len(surroundings_read(source)) == count
