"""A client leaves at any moment: whatever was done for it ends on every worker, and others do not notice."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_world import Fault, SimWorld, request_for, served

from dynrt.runtime.virtual_time import run_virtually

LAST_TOKEN_S = 0.15  # a request as here is over by then


async def leaves(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    after_s=st.floats(0.0, LAST_TOKEN_S),
    num_tokens=st.integers(1, 400),
    local_prefill=st.sampled_from(["never", "always"]),
)
def test_client_leaves_at_any_time(
    tiny_model_dir: Path, seed: int, after_s: float, num_tokens: int, local_prefill: str
) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir, seed)
        async with world.runtime(local_prefill=local_prefill) as runtime:
            other = asyncio.create_task(served(runtime, world, 80, 10))
            client = asyncio.create_task(served(runtime, world, num_tokens, 10))
            await asyncio.sleep(after_s)
            await leaves(client)
            await other
            await world.settle(runtime)
            assert len(world.living()) == 2, "nobody had to be killed for it"

    run_virtually(main())


@pytest.mark.parametrize("local_prefill", ["never", "always"])
def test_client_leaves_in_any_turn_of_the_loop(tiny_model_dir: Path, local_prefill: str) -> None:
    """Between asking for a plan and having it, too."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(local_prefill=local_prefill) as runtime:
            for num_turns in range(15):
                client = asyncio.create_task(served(runtime, world, 60, 5))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                await leaves(client)
                await world.settle(runtime)

    run_virtually(main())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    after_s=st.floats(0.0, LAST_TOKEN_S),
    role=st.sampled_from(["prefill", "decode"]),
    point=st.sampled_from(["handoff cancelled", "step begins", "step ended"]),
)
def test_client_leaves_and_an_engine_dies(
    tiny_model_dir: Path, seed: int, after_s: float, role: str, point: str
) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir, seed, [Fault(role, point, "crash")])
        async with world.runtime(local_prefill="never") as runtime:
            clients = [asyncio.create_task(served(runtime, world, 50 * n + 1, 10)) for n in range(4)]
            await asyncio.sleep(after_s)
            for client in clients[::2]:
                await leaves(client)
            await asyncio.gather(*clients[1::2])

    run_virtually(main())


@pytest.mark.parametrize("num_outputs", [1, 20])
@pytest.mark.parametrize("local_prefill", ["never", "always"])
def test_closing_the_generator_ends_the_request(
    tiny_model_dir: Path, local_prefill: str, num_outputs: int
) -> None:
    """At once, and not when its 500 tokens are there."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(local_prefill=local_prefill) as runtime:
            outputs = runtime.generate(request_for(world.prompt(50), 500))
            for _ in range(num_outputs):
                await anext(outputs)
            await outputs.aclose()
            await world.settle(runtime)
            assert world.points.get(("decode", "step ended"), 0) < num_outputs + 10
            assert b'dynrt_requests_total{outcome="cancelled"} 1.0' in runtime.metrics_text()

    run_virtually(main())
