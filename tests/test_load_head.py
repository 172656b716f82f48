"""Which head ``load`` takes, and that the bytes of trunks are remembered."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import heads
import mlx.core as mx
import pytest
import tiny

import mtplx
from mtplx import fetch, head_file
from mtplx.errors import ModelError, ModelFileError
from mtplx.inspection import inspect
from mtplx.load import load
from mtplx.mtp_patch import AttachedHead
from mtplx.provenance import known_sha256, replacing


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(head_file, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache" / "sha256.json"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes are read for their hash."""
    read: list[str] = []
    real = fetch.file_sha256

    def file_sha256(path: Path) -> str:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(fetch, "file_sha256", file_sha256)
    return read


@pytest.fixture(params=["directory", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "directory":
        return tiny.write_directory(tmp_path / "d")
    (tmp_path / "d").mkdir()
    return tiny.write_gguf(tmp_path / "d" / "x.gguf")


def test_without_any_head(model: Path, hashed: list[str]) -> None:
    bundle = load(model)
    assert (bundle.head, bundle.head_source, bundle.attached) == (None, None, None)
    assert hashed == []
    info = inspect(model)
    assert (info.mtp, info.drafts) == ("none", "ngram")


def test_a_sidecar(model: Path, tmp_path: Path) -> None:
    head = heads.write(tmp_path / "d", load(model))
    bundle = load(model)
    assert bundle.head_source == str(tmp_path / "d")
    assert bundle.head is not None
    assert bundle.head.fc.weight.shape == head.fc.weight.shape
    assert isinstance(bundle.attached, AttachedHead)
    assert bundle.attached is bundle.attached
    assert bundle.attached.head is bundle.head
    info = inspect(model)
    assert (info.mtp, info.drafts) == ("sidecar mtp.safetensors", "mtp")
    for none in ("none", None):
        assert load(model, head=none).head is None
    text = mtplx.generate(bundle, "a b", seed=1, max_tokens=12, depth=3)
    assert text.stats.drafter == "mtp"
    plain = mtplx.generate(load(model, head="none"), "a b", seed=1, max_tokens=12, depth=3)
    assert text.token_ids == plain.token_ids


def test_a_sidecar_of_another_trunk_is_an_error(model: Path, tmp_path: Path) -> None:
    other = load(tiny.write_directory(tmp_path / "other", seed=1))
    heads.write(tmp_path / "d", other)
    for call in (load, inspect):
        with pytest.raises(ModelError, match=r"another trunk.*--any-trunk.*--head none"):
            call(model)
    assert load(model, any_trunk=True).head is not None
    assert load(model, head="none").head is None


def test_half_a_sidecar(model: Path, tmp_path: Path) -> None:
    heads.write(tmp_path / "d", load(model))
    (tmp_path / "d" / "mtp.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"mtp\.safetensors is missing"):
        load(model)


def test_a_path_and_an_instance(model: Path, tmp_path: Path) -> None:
    mine = heads.write(tmp_path / "h", load(model))
    heads.write(tmp_path / "d", load(model), levels=(1,))
    for path in (tmp_path / "h", str(tmp_path / "h")):
        bundle = load(model, head=path)
        assert bundle.head is not None
        assert bundle.head.levels == ()
        assert bundle.head_source == str(tmp_path / "h")
    given = load(model, head=mine)
    assert given.head is mine
    assert given.head_source == "given"


def test_heads_that_are_none(tmp_path: Path) -> None:
    model = tiny.write_directory(tmp_path / "d")
    wrong: Any = object()
    with pytest.raises(TypeError, match="head is a object"):
        load(model, head=wrong)
    # Said before the trunk is looked at.
    for path in (tmp_path / "nowhere", str(tmp_path)):
        with pytest.raises(ModelFileError, match=r"mtp_config\.json is missing"):
            load(tmp_path / "no-model", head=path)
    with pytest.raises(ModelFileError, match="not the directory of a head that mtplx trained"):
        load(model, head=model)


def test_a_shipped_head(model: Path, tmp_path: Path, hashed: list[str]) -> None:
    bundle = load(model)
    other = load(tiny.write_directory(tmp_path / "other", tie_word_embeddings=False))
    heads.write(tmp_path / "shipped" / "a-other", other)
    heads.write(tmp_path / "shipped" / "b-mine", bundle, ids=[1, 2, 3])
    found = load(model)
    assert found.head_source == str(tmp_path / "shipped" / "b-mine")
    assert found.head is not None
    assert found.head.vocabulary is not None
    info = inspect(model)
    assert (info.mtp, info.drafts) == ("b-mine, shipped with mtplx", "mtp")
    # The sidecar comes first.
    heads.write(tmp_path / "d", bundle)
    assert load(model).head_source == str(tmp_path / "d")


def test_a_trunk_is_hashed_only_for_a_shipped_head_of_its_size(
    tmp_path: Path, hashed: list[str]
) -> None:
    small = load(tiny.write_directory(tmp_path / "small"))
    heads.write(tmp_path / "shipped" / "small", small)
    hashed.clear()
    bigger = tiny.write_directory(tmp_path / "bigger", tie_word_embeddings=False)
    assert load(bigger).head is None
    assert hashed == []
    equally_big = tiny.write_directory(tmp_path / "equal", seed=1)
    assert load(equally_big).head is None
    assert hashed == ["model.safetensors"]
    assert load(equally_big, any_trunk=True).head is None


def test_a_broken_shipped_head_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "shipped" / "x").mkdir(parents=True)
    (tmp_path / "shipped" / "x" / "mtp_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="format None"):
        load(tiny.write_directory(tmp_path / "d"))


def test_inspect_says_what_is_not_used(tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "d")
    mx.save_safetensors(str(path / "mtp.safetensors"), {"mtp.fc.weight": mx.zeros((2,))})
    assert load(path).head is None
    info = inspect(path)
    assert info.mtp == "mtp.safetensors without mtp_config.json, not used"
    assert info.drafts == "ngram"


# The memory of hashes


def test_a_hash_is_remembered_until_the_file_changes(
    tmp_path: Path, cache: Path, hashed: list[str]
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = known_sha256(file)
    assert first == known_sha256(file) == fetch.file_sha256(file)
    assert hashed == ["weights", "weights"]
    status = file.stat()
    entry = [status.st_size, status.st_mtime_ns, first]
    assert json.loads(cache.read_text()) == {str(file): entry}
    os.utime(file, ns=(0, status.st_mtime_ns + 1))
    assert known_sha256(file) == first
    file.write_bytes(b"three")
    os.utime(file, ns=(0, status.st_mtime_ns + 1))
    assert known_sha256(file) == fetch.file_sha256(file) != first
    assert len(json.loads(cache.read_text())) == 1
    assert [p.name for p in cache.parent.iterdir()] == ["sha256.json"]


@pytest.mark.parametrize("text", ["", "[1]", '{"FILE": 3}', '{"FILE": []}', '{"FILE": [1, 2]}', "{",
                                  '{"FILE": [SIZE, TIME, "no"]}', '{"FILE": [SIZE, TIME]}', "\xff",
                                  '{"FILE": [SIZE, TIME, null]}', "[" * 100_000])  # fmt: skip
def test_a_corrupt_memory_is_written_anew(tmp_path: Path, cache: Path, text: str) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    cache.parent.mkdir()
    status = file.stat()
    for word, value in (
        ("FILE", file), ("SIZE", status.st_size), ("TIME", status.st_mtime_ns),
    ):  # fmt: skip
        text = text.replace(word, str(value))
    cache.write_bytes(text.encode("latin-1"))
    assert known_sha256(file) == fetch.file_sha256(file)
    assert json.loads(cache.read_text())[str(file)][2] == fetch.file_sha256(file)


def test_a_memory_that_cannot_be_written_is_only_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "file" / "below"))
    assert known_sha256(tmp_path / "file") == fetch.file_sha256(tmp_path / "file")


def test_replacing_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with contextlib.suppress(ZeroDivisionError), replacing(target) as new:
        new.write_text("new")
        _ = 1 / 0
    assert target.read_text() == "old"
    with replacing(target) as new:
        new.write_text("new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["new"]


# The command


def command(*args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'mtplx'; from mtplx.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_command_takes_a_head(tmp_path: Path) -> None:
    model = tiny.write_directory(tmp_path / "d")
    heads.write(tmp_path / "h", load(model))
    heads.write(tmp_path / "other", load(tiny.write_directory(tmp_path / "o", seed=1)))

    def run(*args: str) -> Any:
        common = ("generate", "a b", "-m", str(model), "-n", "8", "--seed", "1", "--json")
        return command(*common, "--depth", "2", *args)

    assert json.loads(run().stdout)["stats"]["drafter"] == "ngram"
    mine = json.loads(run("--head", str(tmp_path / "h")).stdout)
    assert mine["stats"]["drafter"] == "mtp"
    other = run("--head", str(tmp_path / "other"))
    assert (other.returncode, other.stdout) == (1, "")
    assert "--any-trunk" in other.stderr
    forced = json.loads(run("--head", str(tmp_path / "other"), "--any-trunk").stdout)
    assert forced["stats"]["drafter"] == "mtp"
    assert forced["token_ids"] == mine["token_ids"]
    heads.write(model, load(model))
    assert json.loads(run().stdout)["stats"]["drafter"] == "mtp"
    assert json.loads(run("--head", "none").stdout)["stats"]["drafter"] == "ngram"
    info = json.loads(command("inspect", str(model), "--json").stdout)
    assert (info["mtp"], info["drafts"]) == ("sidecar mtp.safetensors", "mtp")
    useless = command("bench", "law", "--head", "none")
    assert useless.returncode == 2
    assert "--head has no use in bench law" in useless.stderr
