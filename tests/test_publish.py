"""Uploading a head, to a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hub
import huggingface_hub as hub_client
import published
import pytest

from mtplx.errors import ModelFileError, PublishError, RequestError
from mtplx.forge.publish import FILES, publish


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = published.write_folder(tmp_path_factory.mktemp("made"))
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path, complete: dict[str, bytes]) -> Iterator[Path]:
    """A complete head, and beside it what must not be uploaded; nothing may change it."""
    path = tmp_path / "head"
    (path / "checkpoints").mkdir(parents=True)
    others = {"notes.txt": b"mine", "checkpoints/README.md": b"x", ".env": b"secret"}
    for name, data in {**complete, **others}.items():
        (path / name).write_bytes(data)
    yield path
    found = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert found == {**complete, **others}


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    monkeypatch.setattr(hub_client.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(hub_client.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's attempts


def sent(folder: Path, hub: fake_hub.FakeHub, repo: str = "me/head", **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        return publish(folder, repo, **options)


def test_the_bytes_arrive(folder: Path, complete: dict[str, bytes]) -> None:
    with fake_hub.running() as hub:
        sizes = sent(folder, hub, private=True)
    assert sizes == {name: len(complete[name]) for name in FILES}
    assert len(sizes) == 6
    [made] = hub.made
    assert made["name"] == "head"
    assert made.get("private") is True or made.get("visibility") == "private"
    [(name, header, files)] = hub.commits
    assert name == "/api/models/me/head/commit/main"
    assert header["summary"] == "MTP head, written by mtplx"
    assert files == complete


def test_another_branch(folder: Path, complete: dict[str, bytes]) -> None:
    with fake_hub.running() as hub:
        sent(folder, hub, "team/head", revision="trial")
    assert hub.made[0]["organization"] == "team"
    assert hub.made[0].get("private") is not True
    assert [name for name, _, _ in hub.commits] == ["/api/models/team/head/commit/trial"]


def test_a_dry_run_contacts_nobody(folder: Path, complete: dict[str, bytes]) -> None:
    with fake_hub.running() as hub:
        assert sent(folder, hub, dry_run=True).keys() == set(FILES)
    assert hub.calls == []


@pytest.mark.parametrize("place", ["/api/repos/create", "/preupload/", "/batch", "/commit/"])
@pytest.mark.parametrize(("status", "says"), [(500, "500"), (403, "403"), (0, "")])
def test_what_goes_wrong_is_named(folder: Path, place: str, status: int, says: str) -> None:
    with fake_hub.running({place: status}) as hub, pytest.raises(PublishError) as e:
        sent(folder, hub)
    message = str(e.value)
    assert message.startswith(f"{hub.address} did not take me/head: ")
    assert says in message
    assert status == 0 or "told off" in message
    assert status != 0 or "disconnected" in message.lower() or "reset" in message.lower()
    assert fake_hub.TOKEN not in message
    assert hub.commits == []


def test_a_blob_that_is_refused(folder: Path) -> None:
    with fake_hub.running({"/blob/": 403}) as hub, pytest.raises(PublishError) as e:
        sent(folder, hub)
    assert "403" in str(e.value)
    assert "signature" not in str(e.value)
    assert hub.commits == []


def test_a_token_that_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong0123456789")
    with fake_hub.running() as hub, pytest.raises(PublishError, match="401") as e:
        sent(folder, hub)
    assert "hf_wrong" not in str(e.value)
    assert hub.made == []


def test_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with fake_hub.running() as hub, pytest.raises(PublishError, match="HF_TOKEN"):
        sent(folder, hub)
    assert hub.calls == []


def test_nobody_listens(folder: Path) -> None:
    with fake_hub.running() as hub:
        pass
    with pytest.raises(PublishError, match="refused"):
        sent(folder, hub)


def test_a_name_that_is_none(folder: Path) -> None:
    with fake_hub.running() as hub, pytest.raises(RequestError, match="a/b/c"):
        sent(folder, hub, "a/b/c")
    assert hub.calls == []


# What is not fit to publish


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder: Path, complete: dict[str, bytes], name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        publish(folder, "me/head", dry_run=True)
    (folder / name).write_bytes(complete[name])


@pytest.mark.parametrize(
    ("name", "old", "new", "match"),
    [
        ("README.md", b"draft", b"DRAFT", "mtplx forge card"),
        ("README.md", b"draft", b"\xff", "README.md"),
        ("measurement.json", b"2.437", b"3.437", "mtplx forge card"),
        ("training.json", b"1501", b"1502", "mtplx forge card"),
        ("mtp.safetensors", b"{", b"[", "its sha256 is not"),
        ("mtp_config.json", b'"format": 1', b'"format": 2', "format 2"),
    ],
)
def test_files_that_do_not_belong_together(
    folder: Path, complete: dict[str, bytes], name: str, old: bytes, new: bytes, match: str
) -> None:
    assert old in complete[name]
    (folder / name).write_bytes(complete[name].replace(old, new, 1))
    with pytest.raises(ModelFileError, match=match):
        publish(folder, "me/head", dry_run=True)
    (folder / name).write_bytes(complete[name])


def test_the_command(folder: Path, complete: dict[str, bytes]) -> None:
    code = "import sys; sys.argv[0] = 'mtplx'; from mtplx.cli import main; main()"

    def run(*more: str, token: str = fake_hub.TOKEN) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": token}
        env["HF_HUB_DISABLE_XET"] = "1"
        words = [sys.executable, "-c", code, "forge", "publish", str(folder), "me/head", *more]
        return subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    with fake_hub.running() as hub:
        dry = run("--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert "would go to me/head" in dry.stdout
        shown = {line.split()[0]: line.split()[1:] for line in dry.stdout.splitlines()[:-1]}
        assert shown == {name: [str(len(complete[name])), "bytes"] for name in FILES}
        assert hub.calls == []
        refused = run(token="hf_wrong0123456789")
        assert refused.returncode == 1
        assert refused.stdout == ""
        assert "401" in refused.stderr
        assert "hf_wrong" not in refused.stderr
        assert "Traceback" not in refused.stderr
        done = run("--private")
        assert done.returncode == 0, done.stderr
        assert "are now in me/head" in done.stdout
    [(_, _, files)] = hub.commits
    assert files == complete
