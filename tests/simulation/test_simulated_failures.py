"""Engines die, hang or get stuck at every point of their work: each request still gets exactly its tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_engine import Harm
from sim_world import Fault, SimWorld, served

from dynrt.runtime.virtual_time import run_virtually

POINTS = [
    ("prefill", "submitted prefill"),
    ("prefill", "step begins"),
    ("prefill", "layer written"),
    ("prefill", "armed"),
    ("prefill", "write posted"),
    ("prefill", "write ended"),
    ("prefill", "step ended"),
    ("decode", "submitted reserve"),
    ("decode", "reserved"),
    ("decode", "units counted"),
    ("decode", "first token known"),
    ("decode", "committed"),
    ("decode", "step begins"),
    ("decode", "step ended"),
]
HARMS: list[Harm] = ["crash", "hang", "stall", "jam"]
NUM_REQUESTS = 4


def run_with(
    model_dir: Path, faults: list[Fault], seed: int = 0, workers: int = 1, idle_s: float = 0.0
) -> SimWorld:
    """Some requests while the faults strike, and one more when the fleet is complete again."""
    world = SimWorld(model_dir, seed, faults)

    async def main() -> None:
        limits = {"heartbeat_limit_s": 3.0, "step_limit_s": 4.0}
        async with world.runtime(prefill=workers, decode=workers, local_prefill="never", **limits) as runtime:
            await asyncio.gather(*(served(runtime, world, 20 + 40 * n, 8) for n in range(NUM_REQUESTS)))
            await world.complete(runtime, 2 * workers)
            await asyncio.sleep(idle_s)
            await served(runtime, world, 100, 5)

    run_virtually(main())
    return world


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("role", "point"), POINTS)
def test_requests_survive_an_engine(tiny_model_dir: Path, role: str, point: str, harm: Harm) -> None:
    for nth in (1, 3):
        fault = Fault(role, point, harm, nth)
        world = run_with(tiny_model_dir, [fault])
        assert fault.has_struck
        assert len(world.engines) == 3, "the engine was restarted, once"


def test_requests_survive_one_of_two(tiny_model_dir: Path) -> None:
    for role, point in POINTS:
        fault = Fault(role, point, "crash", nth=2)
        world = run_with(tiny_model_dir, [fault], workers=2)
        assert fault.has_struck and len(world.engines) == 5


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    faults=st.lists(
        st.builds(
            lambda at, harm, nth: Fault(*at, harm, nth),
            st.sampled_from(POINTS),
            st.sampled_from(HARMS),
            st.integers(1, 12),
        ),
        min_size=1,
        max_size=2,  # of three attempts
    ),
)
def test_requests_survive_several_faults(tiny_model_dir: Path, seed: int, faults: list[Fault]) -> None:
    run_with(tiny_model_dir, faults, seed, workers=2)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_late_registration_of_a_dead_engine_counts_for_nothing(tiny_model_dir: Path, role: str) -> None:
    """Its message and its end cross: whichever is seen first, no worker stays that nobody is."""
    for seed in range(12):
        faults = [Fault(role, "step ended", "crash"), Fault(role, "registering", "crash", nth=2)]
        world = run_with(tiny_model_dir, faults, seed, idle_s=10.0)  # a ghost would miss heartbeats by then
        assert all(fault.has_struck for fault in faults)
        assert len(world.engines) == 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_that_goes_between_plan_and_submit(tiny_model_dir: Path, role: str) -> None:
    for num_turns in range(12):

        async def main(num_turns: int = num_turns) -> None:
            world = SimWorld(tiny_model_dir)
            async with world.runtime(local_prefill="never") as runtime:
                request = asyncio.create_task(served(runtime, world, 50, 4))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                world.living(role)[0].end_seen_at_once()
                await request

        run_virtually(main())
