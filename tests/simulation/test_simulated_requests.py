"""Requests on a healthy fleet in virtual time: right tokens, right text, and nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_engine import next_token
from sim_world import SimWorld, ask, request_for, served

from dynrt.runtime.runtime import Runtime
from dynrt.runtime.virtual_time import run_virtually


def metric(runtime: Runtime, name: str) -> float:
    """The value of a metric, labels and all as its line has them."""
    line = next(line for line in runtime.metrics_text().decode().splitlines() if line.startswith(name + " "))
    return float(line.split()[-1])


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    prefill=st.integers(0, 2),
    decode=st.integers(1, 2),
    local_prefill=st.sampled_from(["auto", "never", "always"]),
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=8),
)
def test_requests_are_served(
    tiny_model_dir: Path,
    seed: int,
    prefill: int,
    decode: int,
    local_prefill: str,
    lengths: list[tuple[int, int]],
) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir, seed)
        async with world.runtime(prefill=prefill, decode=decode, local_prefill=local_prefill) as runtime:
            await asyncio.gather(*(served(runtime, world, *length) for length in lengths))

    run_virtually(main())


def test_never_hands_off_and_always_does_not(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(local_prefill="auto") as runtime:
            for _ in range(3):
                await served(runtime, world, 90, 4, local_prefill="never")
                await served(runtime, world, 90, 4, local_prefill="always")
            await world.settle(runtime)
            assert metric(runtime, 'dynrt_plans_total{kind="remote"}') == 3
            assert metric(runtime, 'dynrt_plans_total{kind="local"}') == 3
            assert metric(runtime, 'dynrt_handoffs_total{outcome="committed"}') == 3
            assert metric(runtime, 'dynrt_requests_total{outcome="finished"}') == 6
            assert metric(runtime, 'dynrt_prefill_tokens_total{source="computed"}') == 6 * 90

    run_virtually(main())


@pytest.mark.parametrize("local_prefill", ["never", "always"])
def test_first_token_can_be_the_last(tiny_model_dir: Path, local_prefill: str) -> None:
    """max_tokens 1, and a stop token sampled first: nothing is left of the reservation."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(local_prefill=local_prefill) as runtime:
            await served(runtime, world, 50, 1)
            prompt_ids = world.prompt(70)
            stop = next_token(prompt_ids)
            answer = await ask(runtime, request_for(prompt_ids, 9, stop_token_ids=(stop,)), prompt_ids)
            assert answer.token_ids == [stop]
            assert answer.finish_reason == "stop"

    run_virtually(main())


def test_more_requests_than_fit_take_turns(tiny_model_dir: Path) -> None:
    """Forty prompts of 20 blocks each on engines of 64 blocks: reservations queue, none starves."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(local_prefill="never") as runtime:
            await asyncio.gather(*(served(runtime, world, 300, 15) for _ in range(40)))
            assert metric(runtime, "dynrt_request_retries_total") == 0

    run_virtually(main())


def test_slow_reader_finds_everything(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime() as runtime:
            prompt_ids = world.prompt(40)
            outputs = []
            async for output in runtime.generate(request_for(prompt_ids, 30)):
                outputs.append(output)
                await asyncio.sleep(60.0)
            assert sum(len(output.token_ids) for output in outputs) == 30
            assert len(outputs) <= 3, "what came meanwhile is read at once"

    run_virtually(main())


def test_same_seed_same_course(tiny_model_dir: Path) -> None:
    def course() -> tuple[dict[tuple[str, str], int], float]:
        world = SimWorld(tiny_model_dir, seed=7)

        async def main() -> float:
            async with world.runtime(prefill=2, decode=2, local_prefill="never") as runtime:
                await asyncio.gather(*(served(runtime, world, 30 * n + 1, 6) for n in range(6)))
                return asyncio.get_running_loop().time()

        ended_at = run_virtually(main())
        return world.points, ended_at

    assert course() == course()


def test_an_hour_of_traffic_and_no_deadline_fires(tiny_model_dir: Path) -> None:
    """One request every twenty seconds, some idle minutes: no restart, no retry, no handoff but committed ones."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(local_prefill="never", heartbeat_interval_s=2.0) as runtime:
            for _ in range(160):
                await served(runtime, world, world.random.randrange(1, 200), 5)
                await asyncio.sleep(20.0)
            await asyncio.sleep(600.0)
            await served(runtime, world, 64, 5)
            await world.settle(runtime)
            assert asyncio.get_running_loop().time() > 3600.0
            assert metric(runtime, 'dynrt_handoffs_total{outcome="committed"}') == 161
            for outcome in ("cancelled", "fenced", "failed"):
                assert metric(runtime, f'dynrt_handoffs_total{{outcome="{outcome}"}}') == 0
            assert metric(runtime, "dynrt_request_retries_total") == 0
        assert len(world.engines) == 2

    run_virtually(main())
