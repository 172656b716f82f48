"""Downloads models of the Hugging Face Hub, pinned to a commit and checked against its digests.

Files lie in ``huggingface_hub``'s own cache, in its layout, so that other programs share them:
``models--<org>--<name>/blobs/<digest>``, ``snapshots/<commit>/<file>`` (links to blobs) and
``refs/<revision>``. mtplx adds ``mtplx/<revision>.json``: the commit and files of a download that
is complete and checked. Only such a one is used, so what others left half done is not. A file
under way is ``blobs/<digest>.mtplx.incomplete``; the next pull goes on with it. (The library itself
starts a file again after an interruption, and gives it its name unchecked.)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mtplx.errors import FetchError, ModelError, ModelFileError, MtplxError
from mtplx.storage import ROOM, Progress, lock, no_room, os_failure

_WEIGHTS, _INDEX = "*.safetensors", "*.safetensors.index.json"
# What is read of a repository: no pickles and no code, whatever it holds.
_WANTED = (
    _WEIGHTS, _INDEX, "config.json", "generation_config.json", "hf_quant_config.json",
    "mtp_config.json", "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template*.json", "chat_template*.jinja", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip
_UNWANTED = ("consolidated*", ".*", "*/*")  # Mistral's weights once more; what lies in folders
_OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".onnx", ".h5", ".msgpack")
# No path that looks like an id and is not there should be asked for: hence no .gguf.
_ID = re.compile(r"(?!.*(--|\.\.|\.gguf$|\.git$)).{1,96}", re.ASCII)
_NAMES = re.compile(r"(\w|\w[\w.-]*\w)/(\w|\w[\w.-]*\w)", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w.+/-]*", re.ASCII)
_COMMIT, _DIGEST = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_ATTEMPTS = 5  # in a row that bring nothing
_TRY_AGAIN = (429, 500, 502, 503, 504)
_PAUSE, _CHUNK = 1.0, 1 << 20  # seconds between them, bytes


@dataclass(frozen=True)
class Repository:
    """A repository's id ("org/name") and a branch, tag or commit of it."""

    id: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which nobody can move."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def folder(self) -> Path:
        """Where ``huggingface_hub`` keeps it."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"models--{self.id.replace('/', '--')}"

    @property
    def record(self) -> Path:
        """The file that says what a complete download holds."""
        return self.folder / "mtplx" / f"{quote(self.revision, safe='')}.json"


@dataclass(frozen=True)
class _Listing:
    """A commit's wanted files: name -> (bytes, digest); a sha256, or git's sha1 of a small file."""

    commit: str
    files: Mapping[str, tuple[int, str]]


def parse(text: str | Path) -> Repository | None:
    """A repository that is written as org/name or org/name@revision; None for anything else."""
    name, at, revision = str(text).partition("@")
    revision = revision if at else "main"
    right = _ID.fullmatch(name) and _NAMES.fullmatch(name) and _REVISION.fullmatch(revision)
    return Repository(name, revision) if right and isinstance(text, str) else None


def locate(repo: Repository) -> Path | None:
    """The directory of a complete download, its sizes checked; None if there is none."""
    listing = _recorded(repo)
    if listing is None:
        return None
    folder = repo.folder / "snapshots" / listing.commit
    return folder if all(_has(folder / n, f) for n, f in listing.files.items()) else None


def pull(repo: Repository, *, on_progress: Progress | None = None, verify: bool = False) -> Path:
    """Makes the newest commit of a revision present in the cache and returns its directory.

    The hub is asked for the commit and its files, then that commit is downloaded: what is not there
    yet, from where an interrupted download stopped. Nothing is asked where HF_HUB_OFFLINE is set,
    or the revision is a commit, and the files are there. ``verify`` compares the digests of files
    that are there, too. ``on_progress`` is called with bytes done and bytes in all.

    Raises ``ModelError`` (no such repository or revision, nothing in it that mtplx reads) and
    ``FetchError`` (offline, no access, disk full, wrong content: what to do is in its text).
    """
    from huggingface_hub import constants

    known = _recorded(repo)
    listing = known if known and (repo.pinned or constants.HF_HUB_OFFLINE) else _ask(repo)
    try:
        if verify or listing != known or not locate(repo):
            repo.record.parent.mkdir(parents=True, exist_ok=True)
            with lock(repo.record.parent / ".lock"):
                compared = set() if verify or not known else set(known.files.values())
                _complete(repo, listing, compared, on_progress)
    except OSError as e:
        raise os_failure(e, repo.folder, "HF_HUB_CACHE") from e
    return repo.folder / "snapshots" / listing.commit


def _recorded(repo: Repository) -> _Listing | None:
    try:
        stored = json.loads(repo.record.read_text(encoding="utf-8"))
        return _listing(stored["commit"], {n: tuple(f) for n, f in stored["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _listing(commit: Any, files: dict[str, Any]) -> _Listing:
    """Checks what becomes names in the cache; ``ValueError`` for anything odd."""
    for name, (size, digest) in files.items():
        right = type(size) is int and size >= 0 and _DIGEST.fullmatch(str(digest))
        if not right or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} of {size!r} bytes, digest {digest!r}")
    if not _COMMIT.fullmatch(str(commit)):
        raise ValueError(f"commit {commit!r}")
    return _Listing(commit, files)


def _has(path: Path, expected: tuple[int, str], read: bool = False) -> bool:
    """Whether a file has its size and, if it is to be read, its digest."""
    try:
        return path.stat().st_size == expected[0] and (not read or _is(path, expected))
    except OSError:
        return False


def _is(path: Path, expected: tuple[int, str]) -> bool:
    def git() -> Any:
        return hashlib.sha1(b"blob %d\0" % expected[0], usedforsecurity=False)

    with path.open("rb") as f:
        kind: Any = "sha256" if len(expected[1]) == 64 else git
        return hashlib.file_digest(f, kind).hexdigest() == expected[1]


def _ask(repo: Repository) -> _Listing:
    """What the hub has at the revision now, and only what mtplx reads."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    _refuse_offline(repo)
    try:
        info = HfApi(endpoint=_endpoint()).model_info(
            repo.id, revision=repo.revision, files_metadata=True, timeout=30
        )
        if repo.pinned and info.sha != repo.revision:
            raise ValueError(f"commit {info.sha!r}")
        everything = info.siblings or ()
        names = [s.rfilename for s in everything]
        listing = _listing(
            info.sha,
            {
                s.rfilename: (s.lfs.size, s.lfs.sha256) if s.lfs else (s.size, s.blob_id)
                for s in everything
                if _matches(s.rfilename, _WANTED) and not _matches(s.rfilename, _UNWANTED)
            },
        )
    except HTTPError as e:
        raise _failure(repo, e) from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FetchError(f"{_endpoint()} answers for {repo} as no hub does ({e!r})") from e
    _check_kinds(f"{repo.id}@{info.sha}", listing, names)
    return listing


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_kinds(where: str, listing: _Listing, everything: list[str]) -> None:
    if not any(_matches(name, (_WEIGHTS,)) for name in listing.files):
        found = sorted(n for n in everything if n.endswith((*_OTHER_WEIGHTS, ".safetensors")))
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        held = f"it holds {', '.join(found[:4])}{more}" if found else "it holds no weights at all"
        hint = "; a llama .gguf file can be given by its path" if ".gguf" in held else ""
        raise ModelError(
            f"{where}: mtplx reads safetensors weights at the top of a repository (they hold no"
            f" code), and {held}{hint}"
        )
    if "config.json" not in listing.files:
        raise ModelFileError(f"{where}: config.json is missing")


def _complete(
    repo: Repository, listing: _Listing, compared: set[tuple[int, str]], on_progress: Any
) -> None:
    """Downloads what is not there, gives it its names and records that; the lock is held.

    ``compared``: the files that need no reading to be known as right.
    """
    blobs, snapshot = repo.folder / "blobs", repo.folder / "snapshots" / listing.commit
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    files = {f: name for name, f in listing.files.items()}  # two names may share a blob
    lacking = [f for f in files if not _has(blobs / f[1], f, f not in compared)]
    done, total = 0, sum(size for size, _ in lacking)
    free = shutil.disk_usage(blobs).free
    if lacking and free < total + ROOM:
        raise no_room(blobs, free, total + ROOM, "HF_HUB_CACHE")
    for weights in (False, True):  # what says whether the weights are all there is small
        for file in [f for f in lacking if _matches(files[f], (_WEIGHTS,)) == weights]:

            def report(have: int, before: int = done) -> None:
                if on_progress:
                    on_progress(before + have, total)

            _download(repo, listing.commit, files[file], file, report)
            done += file[0]
        _check_shards(repo, listing)
    for name, (_, digest) in listing.files.items():
        _link(snapshot / name, blobs / digest)
    if not repo.pinned:
        _write(repo.folder / "refs" / repo.revision, listing.commit)
    _write(repo.record, json.dumps(asdict(listing)))


def _check_shards(repo: Repository, listing: _Listing) -> None:
    """Every file that an index names is in the repository, or ``ModelFileError``."""
    from mtplx.tokenizer import read_json

    for index in (name for name in listing.files if _matches(name, (_INDEX,))):
        mapping = read_json(repo.folder / "blobs" / listing.files[index][1]).get("weight_map")
        for shard in mapping.values() if isinstance(mapping, dict) else ():
            if str(shard) not in listing.files:
                raise ModelFileError(
                    f"{repo.id}@{listing.commit}: {shard} is missing ({index} names it): the "
                    "repository itself is incomplete"
                )


def _download(
    repo: Repository,
    commit: str,
    name: str,
    expected: tuple[int, str],
    report: Callable[[int], None],
) -> None:
    """One file to its place among the blobs, checked; what came of it is kept if it ends early."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    size, digest = expected
    blob = repo.folder / "blobs" / digest
    part = blob.with_name(f"{digest}.mtplx.incomplete")
    url = hf_hub_url(repo.id, name, revision=commit, endpoint=_endpoint())
    idle = 0
    while (have := part.stat().st_size if part.exists() else -1) < size:
        try:
            _refuse_offline(repo)
            _receive(url, part, size, report)
            break
        except HTTPError as e:
            refused = isinstance(e, HfHubHTTPError) and e.response.status_code
            idle = idle + 1 if _size(part) <= max(have, 0) else 0
            if refused == 416:  # the file ends where more was asked for
                break
            if (refused and refused not in _TRY_AGAIN) or idle == _ATTEMPTS:
                raise _failure(repo, e, f"{name} ({_size(part)} of {size} bytes came)") from e
            time.sleep(_PAUSE)
    if not _has(part, expected, True):
        came = _size(part)
        part.unlink(missing_ok=True)
        what = "the right size but another digest" if came == size else f"{came} bytes"
        raise FetchError(
            f"{repo.id}@{commit}: {name} arrived with {what}, expected {size} bytes with digest "
            f"{digest}: it was not kept; try again, and if this stays so, {_endpoint()} or a proxy "
            "before it serves another file"
        )
    with part.open("rb") as f:
        os.fsync(f.fileno())
    os.replace(part, blob)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, part: Path, size: int, report: Callable[[int], None]) -> None:
    """Appends to ``part`` what it lacks of ``size`` bytes, as far as it comes."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if have := _size(part):
        headers["Range"] = f"bytes={have}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        with part.open("ab" if response.status_code == 206 else "wb") as out:
            report(out.tell())
            for chunk in response.iter_bytes(_CHUNK):
                out.write(chunk)
                report(min(out.tell(), size))
                if out.tell() > size:  # whatever it is, it is not the file
                    break


def _link(link: Path, blob: Path) -> None:
    """A link in a snapshot, which appears whole or not at all."""
    temporary = link.with_name(f".{os.getpid()}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(blob, link.parent))
    os.replace(temporary, link)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _refuse_offline(repo: Repository) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise FetchError(
            f"{repo} is not complete in {repo.folder.parent}, and HF_HUB_OFFLINE is set: unset it "
            f"and run `mtplx pull {repo}` while online{_instead(repo)}"
        )


def _instead(repo: Repository) -> str:
    """What can be used without the hub, for the end of a message."""
    if found := locate(repo):
        return f". What was pulled before can be used: commit {found.name}"
    try:
        commit = (repo.folder / "refs" / repo.revision).read_text().strip()
    except OSError:
        return ""
    other = repo.folder / "snapshots" / commit
    if not other.is_dir():
        return ""
    return f". What another program downloaded, unchecked, can be loaded by its path: {other}"


def _failure(repo: Repository, e: Any, what: str = "") -> MtplxError:
    """The error for what the hub, or the way to it, answered; without signed addresses."""
    from huggingface_hub import errors

    status = getattr(getattr(e, "response", None), "status_code", None)
    login = "set HF_TOKEN, or log in with `hf auth login`"
    about = f"{repo}: {what}" if what else str(repo)
    if isinstance(e, errors.GatedRepoError):
        return FetchError(
            f"{repo} is gated: ask for access at {_endpoint()}/{repo.id}, then {login}"
        )
    if isinstance(e, errors.RevisionNotFoundError):
        return ModelError(f"{repo.id} has no revision {repo.revision!r} at {_endpoint()}")
    if isinstance(e, errors.RepositoryNotFoundError):
        return ModelError(
            f"no model {str(repo)!r}: there is no such file or directory, and no such repository "
            f"at {_endpoint()}; if it is a private one, {login}"
        )
    if status in (401, 403):
        return FetchError(f"{_endpoint()} refuses {about} (HTTP {status}): {login} with access")
    if status:
        return FetchError(f"{_endpoint()} did not give {about} (HTTP {status}): try again later")
    reason = str(e) or type(e).__name__
    return FetchError(
        f"{_endpoint()} cannot be reached for {about} ({reason}): go online, or try again; a "
        f"download goes on where it stopped{_instead(repo)}"
    )
