"""The real default model, and time for real engines to start on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynrt.engines.models.resolve import prepare

HANG_S = 600.0  # a test that ends by this leaves its engines behind, and sockets for the next test to be blamed for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_ours = item.path.is_relative_to(Path(__file__).parent)
        if is_ours and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(HANG_S))


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """In the user's own cache: fetched and converted by whoever comes first."""
    return Path(prepare(None, print).path)
