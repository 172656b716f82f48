"""Downloads from a hub on this machine that go wrong, stop half way, or come out whole."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from pathlib import Path

import fake_hub
import huggingface_hub
import huggingface_hub.constants
import pytest
from fake_hub import INDEX, REPO, SHARDS

from mtplx import fetch, hub
from mtplx.errors import FetchError, ModelError, ModelFileError

pytestmark = pytest.mark.usefixtures("hub_cache")


def nothing_is_used(hub_cache: Path) -> None:
    assert fetch.lacks(REPO)
    assert not list(hub_cache.rglob("*.json"))  # neither a record nor a link
    with pytest.raises(ModelError, match=f"not downloaded yet: `mtplx pull {REPO}"):
        fetch.resolve(REPO, download=False)


def test_progress(there: fake_hub.FakeHub, model_files: dict[str, bytes]) -> None:
    seen: list[tuple[int, int]] = []
    fetch.pull(REPO, on_progress=lambda done, total: seen.append((done, total)))
    size = sum(map(len, model_files.values()))
    done = [d for d, _ in seen]
    assert {total for _, total in seen} == {size}
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, size)
    assert len(set(done)) > size // 2000
    seen.clear()
    fetch.pull(REPO, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == []


@pytest.mark.parametrize("name", [SHARDS[1], "config.json", INDEX])
@pytest.mark.parametrize("fault", ["digest", "short", "long", "empty"])
def test_other_contents_are_refused(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], hub_cache: Path, name: str, fault: str
) -> None:
    data = model_files[name]
    wrong = {"digest": data[:-1] + b"\0", "short": data[:-7], "long": data + b"\n", "empty": b""}
    there.served[name] = wrong[fault]
    match = "another digest" if fault == "digest" else f"arrived with {len(wrong[fault])} bytes"
    with pytest.raises(FetchError, match=f"{name} arrived with .*{match.split()[-1]}") as e:
        fetch.pull(REPO)
    assert f"expected {len(data)} bytes" in str(e.value)
    nothing_is_used(hub_cache)
    there.served.clear()
    there.asked.clear()
    path = fetch.pull(REPO)
    assert (name, None) in there.asked  # nothing of the wrong one was kept
    assert {p.name: p.read_bytes() for p in path.iterdir()} == model_files


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    there: fake_hub.FakeHub, model_files: dict[str, bytes]
) -> None:
    name = SHARDS[0]
    there.cuts[name] = [2500, 1000, 0, 0, 3000]
    path = fetch.pull(REPO)
    assert (path / name).read_bytes() == model_files[name]
    ranges = [asked for asked_name, asked in there.asked if asked_name == name]
    assert ranges[0] is None
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in ranges[1:]]
    assert starts == sorted(starts)
    assert 1000 <= starts[0] <= 2500
    assert len(starts) == 5


def test_an_interrupted_download_goes_on_with_the_next_pull(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total - len(model_files[SHARDS[1]]) // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.pull(REPO, on_progress=stop)
    nothing_is_used(hub_cache)
    [part] = hub_cache.rglob("*.incomplete")
    size = part.stat().st_size
    assert 0 < size < len(model_files[SHARDS[1]])
    there.asked.clear()
    seen: list[int] = []
    path = fetch.pull(REPO, on_progress=lambda done, total: seen.append(done))
    assert there.asked == [(SHARDS[1], f"bytes={size}-")]
    assert seen[0] == size
    assert {p.name: p.read_bytes() for p in path.iterdir()} == model_files
    assert not list(hub_cache.rglob("*.incomplete"))


def test_a_hub_that_knows_no_ranges(there: fake_hub.FakeHub, model_files: dict[str, bytes]) -> None:
    there.ranges = False
    there.cuts[SHARDS[0]] = [2500]
    assert (fetch.pull(REPO) / SHARDS[0]).read_bytes() == model_files[SHARDS[0]]
    assert [n for n, _ in there.asked].count(SHARDS[0]) == 2


def test_a_connection_that_keeps_breaking(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    there.cuts[SHARDS[0]] = [2500, *[0] * 50]
    with pytest.raises(
        FetchError, match=rf"{SHARDS[0]} \(\d+ of {len(model_files[SHARDS[0]])} bytes"
    ):
        fetch.pull(REPO)
    assert 40 < len(there.cuts[SHARDS[0]]) < 50  # it gave up
    nothing_is_used(hub_cache)


def test_a_hub_that_is_busy(there: fake_hub.FakeHub, model_files: dict[str, bytes]) -> None:
    there.faults["/config.json"] = 503
    with pytest.raises(FetchError, match=r"config\.json .*HTTP 503.*try again"):
        fetch.pull(REPO)
    assert len([c for c in there.calls if c.endswith("/config.json")]) > 2
    there.faults = {"/api/": 500}
    with pytest.raises(FetchError, match=r"HTTP 500.*try again"):
        fetch.pull(REPO)


def test_a_missing_shard_is_named_before_any_weights_come(
    there: fake_hub.FakeHub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    there.hold(REPO, {n: data for n, data in model_files.items() if n != SHARDS[1]})
    with pytest.raises(ModelFileError, match=f"{SHARDS[1]} is missing .{INDEX} names it"):
        fetch.pull(REPO)
    assert SHARDS[0] not in dict(there.asked)
    nothing_is_used(hub_cache)


def test_what_no_hub_would_say(there: fake_hub.FakeHub, hub_cache: Path) -> None:
    odd = [
        {"sha": "../../../x"}, {"sha": None}, {"siblings": [{"rfilename": "config.json"}]},
        {"siblings": [{"rfilename": "config.json", "size": 2, "blobId": "../../../../x"}]},
        {"siblings": [{"rfilename": "a.safetensors", "size": 2, "lfs": {"size": 2}}]},
        {"siblings": [{"rfilename": "config.json", "size": -1, "blobId": "0" * 40}]},
        {"siblings": 7},
    ]  # fmt: skip
    for there.changes in odd:
        with pytest.raises(FetchError, match="as no hub does"):
            fetch.pull(REPO)
    assert there.asked == []
    assert not hub_cache.exists()


def test_what_another_program_left(
    there: fake_hub.FakeHub,
    model_files: dict[str, bytes],
    hub_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not used before it has been compared with the hub; then only what lacks is fetched."""
    commit = there.branches[f"{REPO}@main"]
    path = hub_cache / "snapshots" / commit
    for folder in (path, hub_cache / "blobs", hub_cache / "refs"):
        folder.mkdir(parents=True)
    (hub_cache / "refs" / "main").write_text(commit)
    for name in SHARDS:
        blob = hub_cache / "blobs" / hashlib.sha256(model_files[name]).hexdigest()
        blob.write_bytes(model_files[name])
        (path / name).symlink_to(f"../../blobs/{blob.name}")
    broken = (path / SHARDS[1]).resolve()
    broken.write_bytes(model_files[SHARDS[1]][:-1] + b"\0")
    assert fetch.lacks(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match=f"by its path: {path}$"):
        fetch.resolve(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    there.asked.clear()
    assert fetch.resolve(REPO) == path
    assert sorted(n for n, _ in there.asked) == sorted(set(model_files) - {SHARDS[0]})
    assert broken.read_bytes() == model_files[SHARDS[1]]


def test_a_branch_that_moves_meanwhile(
    there: fake_hub.FakeHub, model_files: dict[str, bytes]
) -> None:
    """Every file is of the commit that was asked for first."""
    first = there.branches[f"{REPO}@main"]
    other = {name: data + b" " for name, data in model_files.items()}
    path = fetch.pull(REPO, on_progress=lambda *_: there.hold(REPO, other) and None)
    assert path.name == first
    assert there.branches[f"{REPO}@main"] != first
    assert {p.name: p.read_bytes() for p in path.iterdir()} == model_files


def test_verify_mends(there: fake_hub.FakeHub, model_files: dict[str, bytes]) -> None:
    path = fetch.pull(REPO)
    there.asked.clear()
    for name in (SHARDS[0], "config.json"):
        file = (path / name).resolve()
        file.write_bytes(bytes(len(model_files[name])))
        assert fetch.pull(REPO) == path  # the sizes are right
        assert there.asked == []
        fetch.pull(REPO, verify=True)
        assert file.read_bytes() == model_files[name]
        assert there.asked.pop() == (name, None)
        file.write_bytes(b"short")  # which is seen without asking for it
        assert fetch.lacks(REPO)
        assert fetch.resolve(REPO) == path
        assert file.read_bytes() == model_files[name]
        there.asked.clear()


def test_signed_addresses_are_not_shown(there: fake_hub.FakeHub) -> None:
    there.faults["/cdn/"] = 403
    with pytest.raises(FetchError, match=rf"{SHARDS[0]} .*HTTP 403") as e:
        fetch.pull(REPO)
    assert "secret" not in str(e.value)


def test_file_names_with_odd_characters(
    there: fake_hub.FakeHub, model_files: dict[str, bytes]
) -> None:
    odd = {"model extra é#1%20?.safetensors": b"1", "tokenizer [a]&b=c+.json": b"2"}
    there.hold("me/odd", model_files | odd)
    path = fetch.pull("me/odd")
    assert {p.name: p.read_bytes() for p in path.iterdir()} == model_files | odd


def test_two_pulls_at_once(there: fake_hub.FakeHub, model_files: dict[str, bytes]) -> None:
    paths: list[Path] = []
    both = [threading.Thread(target=lambda: paths.append(fetch.pull(REPO))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert paths == [fetch.resolve(REPO)] * 2
    assert sorted(name for name, _ in there.asked) == sorted(model_files)


def test_the_disk(
    there: fake_hub.FakeHub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(hub_cache.parent.parent)._replace(free=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(hub.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(FetchError, match=r"1 MiB free.*HF_HUB_CACHE"):
            fetch.pull(REPO)
    assert there.asked == []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_receive", full)
        with pytest.raises(FetchError, match=r"disk is full.*HF_HUB_CACHE"):
            fetch.pull(REPO)
    nothing_is_used(hub_cache)
