"""Fixtures for several packages' tests. This file also puts `tests/` on sys.path, for `tiny_model`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is a matter of what else runs on the machine: no test depends on it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float32 with tokenizer and chat template; read-only for tests."""
    from tiny_model import write_tiny_model  # here: most tests should not pay for importing torch

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
