"""Simulated engines for this folder's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from virtual_engine import VirtualEngine, sim_config, write_model_config


@pytest.fixture(scope="session")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("sim") / "model")


@pytest.fixture
def make_engine(config_dir: Path) -> Callable[..., VirtualEngine]:
    def make(**changes: Any) -> VirtualEngine:
        return VirtualEngine(sim_config(config_dir, **changes))

    return make
