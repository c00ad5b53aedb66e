"""Native engines on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from native_rig import MakeEngine

from dynrt.engines.config import EngineConfig
from dynrt.engines.native.engine import NativeEngine


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Iterator[MakeEngine]:
    engines: list[NativeEngine] = []
    defaults = EngineConfig(
        str(tiny_model_dir), "tiny", dtype="float32", device="cpu", threads=1, kv_blocks=40, block_size=8
    )

    def make(**changes: Any) -> NativeEngine:
        engines.append(NativeEngine(msgspec.structs.replace(defaults, **changes)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
