"""An engine is asked at once, then only so often, and never again once it has left."""

from __future__ import annotations

import asyncio

from dynrt.runtime.messages import SnapshotRequest
from dynrt.runtime.snapshot_asks import INTERVAL_S, SnapshotAsks
from dynrt.runtime.virtual_time import run_virtually


class Noting:
    """Who was asked, and when."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str]] = []

    def __call__(self, incarnation: str, wanted: SnapshotRequest) -> None:
        self.asked.append((asyncio.get_running_loop().time(), incarnation))


def test_a_broken_engine_is_asked_only_so_often() -> None:
    noting = Noting()

    async def main() -> None:
        asks = SnapshotAsks(noting)
        for _ in range(100):
            asks.want("broken")
            await asyncio.sleep(INTERVAL_S / 40)
        asks.want("other")
        await asyncio.sleep(2 * INTERVAL_S)

    run_virtually(main())
    broken = [at for at, incarnation in noting.asked if incarnation == "broken"]
    assert broken == [0.0, INTERVAL_S, 2 * INTERVAL_S, 3 * INTERVAL_S]
    assert [incarnation for _, incarnation in noting.asked].count("other") == 1


def test_who_has_left_is_not_asked() -> None:
    noting = Noting()

    async def main() -> None:
        asks = SnapshotAsks(noting)
        asks.want("gone")
        asks.want("gone")
        asks.forget("gone")
        asks.forget("never seen")
        await asyncio.sleep(2 * INTERVAL_S)

    run_virtually(main())
    assert noting.asked == [(0.0, "gone")]
