"""Virtual time: it jumps, it is deterministic, and what can never go on is told."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from dynrt.runtime.virtual_time import DeadlockError, HorizonError, run_virtually


def test_a_day_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(3600.0)


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def main() -> list[float]:
        fired: list[float] = []
        times = [Random(0).uniform(0.0, 50.0) for _ in range(100)]
        loop = asyncio.get_running_loop()
        for time in times:
            loop.call_at(time, fired.append, time)
        await asyncio.sleep(60.0)
        assert fired == sorted(times)
        return fired

    assert run_virtually(main()) == run_virtually(main())


def test_timeouts_work_on_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(7.0)


def test_deadlock_names_who_waits() -> None:
    async def main() -> None:
        waiter = asyncio.create_task(asyncio.Event().wait(), name="the waiter")
        await waiter

    with pytest.raises(DeadlockError, match="the waiter"):
        run_virtually(main())


def test_horizon_ends_what_never_ends() -> None:
    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(1.0)

    with pytest.raises(HorizonError, match="after 100 s"):
        run_virtually(main(), horizon_s=100.0)


def test_failure_in_a_callback_is_raised() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)

    with pytest.raises(ZeroDivisionError):
        run_virtually(main())
