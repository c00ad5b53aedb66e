"""A program that spawns stand-in engines, one for each of its arguments, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dynrt.engines.config import EngineConfig
from dynrt.runtime import spawner


async def main() -> None:
    stand_in = Path(__file__).with_name("stand_in_engine.py")
    spawner.dynrt_command = lambda: [sys.executable, str(stand_in)]
    config = EngineConfig(model_dir="", model_name="waits")
    for report in sys.argv[1:]:
        spawner.ProcessSpawner().spawn(config, report, "token")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
