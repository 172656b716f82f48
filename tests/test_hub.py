"""Models of the Hugging Face Hub, from a hub on this machine: what an id means."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_hub
import huggingface_hub
import huggingface_hub.constants
import pytest
import tiny
from fake_hub import NOWHERE, REPO, SHARDS, UNREAD

import mtplx
from mtplx import fetch, hub
from mtplx.errors import FetchError, ModelError, MtplxError

pytestmark = pytest.mark.usefixtures("hub_cache")


def test_a_model_is_loaded_by_its_id(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    commit = there.branches[f"{REPO}@main"]
    bundle = mtplx.load(REPO)
    provenance = bundle.provenance
    assert provenance.source == f"{REPO}@{commit}"
    assert provenance.path == hub_cache / "snapshots" / commit == fetch.resolve(REPO)
    assert {p.name: p.read_bytes() for p in provenance.path.iterdir()} == model_files
    assert sorted(name for name, _ in there.asked) == sorted(model_files)  # each once, nothing else
    assert provenance.sha256 == {n: hashlib.sha256(model_files[n]).hexdigest() for n in SHARDS}
    plain = mtplx.generate(bundle, "ab", seed=1, max_tokens=8, chat=False)
    folder = shutil.copytree(provenance.path, "copy")
    again = mtplx.generate(mtplx.load(folder), "ab", seed=1, max_tokens=8, chat=False)
    assert plain.token_ids == again.token_ids


def test_the_cache_is_the_one_of_huggingface_hub(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    path = fetch.pull(REPO)
    there.asked.clear()
    found = huggingface_hub.snapshot_download(
        REPO, cache_dir=hub_cache.parent, endpoint=there.address, local_files_only=True
    )
    assert Path(found) == path
    for name, data in model_files.items():
        assert huggingface_hub.try_to_load_from_cache(REPO, name, hub_cache.parent) == str(
            path / name
        )
        digest = hashlib.sha256(data).hexdigest()
        kind = digest if name in SHARDS else fake_hub.git_digest(data)
        assert (path / name).resolve() == (hub_cache / "blobs" / kind).resolve()
    [repo] = huggingface_hub.scan_cache_dir(hub_cache.parent).repos
    assert [r.commit_hash for r in repo.revisions] == [path.name]


def test_a_later_commit_is_taken_only_when_asked(
    there: fake_hub.FakeHub, model_files: dict[str, bytes]
) -> None:
    first = fetch.resolve(REPO)
    later = model_files | {"generation_config.json": b'{"eos_token_id": 1}'}
    commit = there.hold(REPO, later)
    there.calls.clear()
    there.asked.clear()
    assert fetch.resolve(REPO) == first
    assert not fetch.lacks(REPO)
    assert there.calls == []
    second = fetch.pull(REPO)
    assert second.name == commit != first.name
    assert there.asked == [("generation_config.json", None)]  # the rest is the same
    assert fetch.resolve(REPO) == second
    assert fetch.resolve(f"{REPO}@{first.name}") == first
    assert fetch.origin(f"{REPO}@{first.name}", first) == f"{REPO}@{first.name}"
    assert json.loads((first / "generation_config.json").read_bytes()) == {"eos_token_id": tiny.EOS}


def test_a_commit_and_a_branch_are_held_to(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = there.branches[f"{REPO}@main"]
    branch = there.hold(REPO, model_files | {"vocab.txt": b"1"}, "refs/pr/1")
    there.hold(REPO, model_files | {"vocab.txt": b"2"})
    assert fetch.pull(f"{REPO}@{old}").name == old
    assert fetch.pull(f"{REPO}@refs/pr/1").name == branch
    there.calls.clear()
    assert fetch.pull(f"{REPO}@{old}").name == old
    assert fetch.pull(f"{REPO}@{old}", verify=True).name == old
    assert there.calls == []  # a commit cannot have moved
    there.changes = {"sha": branch}
    with pytest.raises(FetchError, match=f"as no hub does.*{branch}"):
        fetch.pull(f"{REPO}@{there.branches[REPO + '@main']}")


@pytest.mark.parametrize(
    ("held", "match"),
    [
        (["pytorch_model.bin", "config.json"], r"safetensors.*it holds pytorch_model\.bin$"),
        (["a.Q4_K.gguf", "b.gguf"], r"it holds a\.Q4_K\.gguf, b\.gguf; a llama \.gguf file"),
        (["unet/x.safetensors", "config.json"], r"at the top .*it holds unet/x\.safetensors"),
        ([f"{i}.bin" for i in range(9)], r"0\.bin, 1\.bin, 2\.bin, 3\.bin and 5 more"),
        (["README.md"], "it holds no weights at all"),
        (["model.safetensors"], r"config\.json is missing"),
    ],
)
def test_what_is_not_read(there: fake_hub.FakeHub, held: list[str], match: str) -> None:
    there.hold("me/other", dict.fromkeys(held, b"x"))
    with pytest.raises(ModelError, match=match):
        fetch.pull("me/other")
    assert there.asked == []


def test_code_is_never_fetched(there: fake_hub.FakeHub, model_files: dict[str, bytes]) -> None:
    config = json.loads(model_files["config.json"]) | {"model_file": "modeling_tiny.py"}
    there.hold(REPO, model_files | UNREAD | {"config.json": json.dumps(config).encode()})
    with pytest.raises(ModelError, match="never runs code"):
        mtplx.load(REPO)
    assert not [name for name, _ in there.asked if name.endswith(".py")]


def test_offline(there: fake_hub.FakeHub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match=rf"HF_HUB_OFFLINE is set.*`mtplx pull {REPO}`"):
        fetch.resolve(REPO)
    assert there.calls == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    path = fetch.pull(REPO)
    there.calls.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert mtplx.load(REPO).provenance.path == path
    assert fetch.pull(REPO) == fetch.pull(REPO, verify=True) == path
    (path / SHARDS[0]).resolve().write_bytes(b"")
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        fetch.resolve(REPO)
    assert there.calls == []


def test_nobody_answers(there: fake_hub.FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    with pytest.raises(FetchError, match=rf"{NOWHERE} cannot be reached.*go online"):
        fetch.resolve(REPO)
    monkeypatch.setenv("HF_ENDPOINT", there.address)
    path = fetch.pull(REPO)
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert fetch.resolve(REPO) == path
    with pytest.raises(FetchError, match=f"pulled before can be used: commit {path.name}"):
        fetch.pull(REPO)


@pytest.mark.parametrize(
    ("model", "kind", "match"),
    [
        ("me/nothing", ModelError, "no model 'me/nothing'.*no such file.*HF_TOKEN"),
        (f"{REPO}@no-branch", ModelError, f"{REPO} has no revision 'no-branch'"),
        ("me/private", ModelError, "no such repository.*private.*HF_TOKEN"),
        ("me/gated", FetchError, r"gated: ask for access at http://127.*/me/gated.*HF_TOKEN"),
    ],
)
def test_no_access(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch,
    model: str, kind: type[MtplxError], match: str,
) -> None:  # fmt: skip
    for name, which in (("me/private", there.closed), ("me/gated", there.gated)):
        there.hold(name, model_files)
        which.add(name)
    with pytest.raises(kind, match=match):
        mtplx.load(model)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong0123456789")
    with pytest.raises(FetchError, match=r"refuses .*HTTP 401.*HF_TOKEN") as e:
        mtplx.load(model)
    assert "hf_wrong" not in str(e.value)
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    if model in ("me/private", "me/gated"):
        assert {p.name for p in fetch.resolve(model).iterdir()} == set(model_files)
    else:
        with pytest.raises(kind, match="no"):
            mtplx.load(model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", "main")),
        ("0rg_-x/N.a-m_e@v1.0", ("0rg_-x/N.a-m_e", "v1.0")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("org/name@" + "a" * 40, ("org/name", "a" * 40)),
        *[(text, None) for text in (
            "name", "org/name/x", "/org/name", "./name", "../name", "~/name", "org/", "org/na me",
            "org/na--me", "org/na..me", "org/name@", "org/name@../x", "org/name@-x", "org/name@a b",
            "org/näme", "org/name.gguf", "org/name.git", "org/name.", "org/n" + "x" * 96,
            "org\\name", "org/name\n", Path("org/name"),
        )],
    ],
)  # fmt: skip
def test_ids(text: str, expected: tuple[str, str] | None) -> None:
    found = hub.parse(text)
    assert (found and (found.id, found.revision)) == expected
    if expected is None:
        with pytest.raises(ModelError, match="no model"):
            fetch.resolve(text)
    else:
        huggingface_hub.utils.validate_repo_id(expected[0])


def test_a_path_wins(there: fake_hub.FakeHub) -> None:
    folder = tiny.write_directory(Path(REPO))
    assert fetch.resolve(REPO) == fetch.pull(REPO) == folder
    assert mtplx.load(REPO).provenance.source == REPO
    assert not fetch.lacks(REPO)
    assert there.calls == []


@pytest.mark.slow
def test_the_commands(there: fake_hub.FakeHub, tmp_path: Path) -> None:
    code = "import sys; sys.argv[0] = 'mtplx'; from mtplx.cli import main; main()"
    # Not the names that this process was started with: what the library itself reads.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))} | {
        "HF_ENDPOINT": there.address, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "100",
    }  # fmt: skip

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *words], env=env, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    commit = there.branches[f"{REPO}@main"]
    first = run("generate", "ab", "--raw", "-n", "2", "--json", "-m", REPO)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["token_ids"]
    assert f"downloading {REPO}, 0 MB" in first.stderr
    assert f"{REPO}@{commit}" in first.stderr
    there.calls.clear()
    found = run("inspect", REPO, "--json")
    assert json.loads(found.stdout)["source"] == f"{REPO}@{commit}"
    assert there.calls == []
    pulled = run("pull", f"{REPO}@main")
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.strip().endswith(f"home/hub/models--me--Tiny_1.5-it/snapshots/{commit}")
