"""Workers that come and go under load, and die while they are being connected: each request keeps an owner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_engine import Harm
from sim_world import Fault, SimWorld, served, until

from dynrt.runtime.virtual_time import run_virtually

LIMITS = {"local_prefill": "never", "heartbeat_limit_s": 3.0, "step_limit_s": 4.0}


@pytest.mark.parametrize("harm", ["crash", "hang", "jam"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_dies_between_introduction_and_connection(
    tiny_model_dir: Path, role: str, harm: Harm
) -> None:
    """Elsewhere its requests wait for remote KV for ever."""
    fault = Fault(role, "introduced", harm, nth=2)

    async def main() -> None:
        world = SimWorld(tiny_model_dir, faults=[fault])
        async with world.runtime(**LIMITS) as runtime:
            joined = world.join(role)  # type: ignore[arg-type]
            await asyncio.gather(*(served(runtime, world, 40 * n + 1, 6) for n in range(4)))
            await until(lambda: fault.has_struck, "the engine that joined has been introduced")
            await world.complete(runtime, 3 if joined.is_alive else 2)
            await served(runtime, world, 60, 6)

    run_virtually(main())


@settings(max_examples=6)
@given(seed=st.integers(0, 2**16))
def test_no_request_vanishes_while_workers_come_and_go(tiny_model_dir: Path, seed: int) -> None:
    """Once a second a worker joins, and one leaves, dies or hangs: elsewhere, requests planned on it are forgotten."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir, seed)
        async with world.runtime(max_attempts=10, **LIMITS) as runtime:
            churn = asyncio.create_task(come_and_go(world))
            requests = []
            for number in range(40):
                requests.append(asyncio.create_task(served(runtime, world, 1 + 5 * number, 1 + number % 9)))
                await asyncio.sleep(0.1)
            async with asyncio.timeout(60.0):
                await asyncio.gather(*requests)
            churn.cancel()

    run_virtually(main())


async def come_and_go(world: SimWorld) -> None:
    while True:
        joined = world.join(world.random.choice(["prefill", "decode"]))
        await asyncio.sleep(world.random.uniform(0.5, 1.5))
        if joined.is_alive and world.random.random() < 0.3:
            joined.leave()
        elif joined.is_alive:
            joined.harm(world.random.choice(["crash", "hang"]))
