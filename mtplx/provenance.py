"""Where a model came from, and which bytes it is made of."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from . import fetch


@dataclass(frozen=True)
class Provenance:
    """Where a model came from and in what form it runs."""

    source: str  # the name or path that was asked for; of a hub's, org/name@commit
    path: Path  # the file or directory that was read
    files: tuple[Path, ...]  # weight files
    architecture: str  # mlx-lm's model_type
    quantisation: str  # as stored, e.g. "Q4_1 layers, Q8_0 embedding, F32 norms"
    runs: str  # e.g. "float32, dequantised"
    parameters: int  # number of weights, tied ones once
    config: Mapping[str, Any] = field(repr=False)

    @cached_property
    def sha256(self) -> dict[str, str]:
        """sha256 of every weight file by file name; read on first use (0.1 s per 100 MB)."""
        return {f.name: known_sha256(f) for f in self.files}


def known_sha256(path: Path) -> str:
    """sha256 of a file, remembered in the cache for as long as size and modification time stay."""
    memory = fetch.cache_dir() / "sha256.json"
    path = path.absolute()
    status = path.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    entry = _remembered(memory).get(str(path))
    if isinstance(entry, list) and entry[:2] == stamp and is_sha256(entry[-1]):
        return entry[-1]
    digest = fetch.file_sha256(path)
    with suppress(OSError):  # what cannot be remembered is only slower
        memory.parent.mkdir(parents=True, exist_ok=True)
        with replacing(memory) as new:
            new.write_text(json.dumps(_remembered(memory) | {str(path): [*stamp, digest]}))
    return digest


def _remembered(memory: Path) -> dict[str, Any]:
    try:
        value = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_sha256(value: Any) -> bool:
    """Whether a value is a sha256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which becomes ``path`` at the end: whole and on the disk, or not at all."""
    temporary = path.with_name(f".partial-{os.getpid()}-{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
