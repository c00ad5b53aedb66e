"""`dynrt engine`, where a decode worker samples the first token itself, as an engine must that cannot take one."""

from __future__ import annotations

import sys

import msgspec

from dynrt.engines import process
from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import Engine, EngineInfo
from dynrt.engines.sim.engine import SimEngine
from dynrt.runtime.cli import main


class SamplingEngine(SimEngine):
    """Computes the prompt's last token once more, like a request whose whole prompt was a prefix hit."""

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, first_token_from="decode")

    def commit(self, key: bytes, epoch: int, first_token: int | None) -> None:
        assert first_token is None, f"it cannot take {first_token}"
        scheduler = self._scheduler
        sequence = scheduler._reserved.pop((key, epoch))
        sequence.num_computed = len(sequence.token_ids) - 1
        scheduler._running[key, epoch] = sequence


def open_engine(config: EngineConfig) -> Engine:
    return (SamplingEngine if config.role == "decode" else SimEngine)(config)


process.open_engine = open_engine
if __name__ == "__main__":
    sys.exit(main())
