"""The real default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynrt.engines.models.resolve import prepare


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """In the user's own cache: fetched and converted by whoever comes first."""
    return Path(prepare(None, print).path)
