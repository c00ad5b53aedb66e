"""Decode engines that sample the first token themselves: nobody sees prefill's, whatever fails and whoever is slow."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_engine import Harm, next_token
from sim_world import Fault, SimWorld, ask, request_for, served

from dynrt.runtime.errors import EngineError
from dynrt.runtime.runtime import Runtime
from dynrt.runtime.virtual_time import run_virtually

POINTS = [
    ("prefill", "write posted"),
    ("prefill", "write ended"),
    ("prefill", "step ended"),
    ("decode", "reserved"),
    ("decode", "units counted"),
    ("decode", "committed"),
    ("decode", "step begins"),
    ("decode", "step ended"),
]


def sampling_world(model_dir: Path, seed: int = 0, faults: list[Fault] | None = None) -> SimWorld:
    world = SimWorld(model_dir, seed, faults or [])
    world.samplers = frozenset({"decode"})
    return world


async def serve_some(world: SimWorld, runtime: Runtime) -> None:
    """Answers of one and of several tokens, all of them right."""
    await asyncio.gather(*(served(runtime, world, 20 + 40 * n, 1 + 7 * (n % 2)) for n in range(4)))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    samplers=st.sampled_from([{"decode"}, {"prefill"}, {"prefill", "decode"}]),
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=6),
)
def test_any_pair_says_each_token_once(
    tiny_model_dir: Path, seed: int, samplers: set[str], lengths: list[tuple[int, int]]
) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir, seed)
        world.samplers = frozenset(samplers)
        async with world.runtime(decode=2, local_prefill="never") as runtime:
            await asyncio.gather(*(served(runtime, world, *length) for length in lengths))

    run_virtually(main())


@pytest.mark.parametrize("harm", ["crash", "hang", "stall", "jam"])
@pytest.mark.parametrize(("role", "point"), POINTS)
def test_its_requests_survive_an_engine(tiny_model_dir: Path, role: str, point: str, harm: Harm) -> None:
    fault = Fault(role, point, harm, nth=2)

    async def main() -> None:
        world = sampling_world(tiny_model_dir, faults=[fault])
        limits = {"heartbeat_limit_s": 3.0, "step_limit_s": 4.0}
        async with world.runtime(local_prefill="never", **limits) as runtime:
            await serve_some(world, runtime)
            await world.complete(runtime, 2)
            await serve_some(world, runtime)

    run_virtually(main())
    assert fault.has_struck


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    faults=st.lists(
        st.builds(
            lambda at, harm, nth: Fault(*at, harm, nth),
            st.sampled_from(POINTS),
            st.sampled_from(["crash", "hang", "stall", "jam"]),
            st.integers(1, 8),
        ),
        min_size=1,
        max_size=2,
    ),
)
@example(
    seed=135, faults=[Fault("prefill", "write posted", "hang", 6), Fault("decode", "step begins", "crash", 2)]
)
def test_its_requests_survive_several_faults(tiny_model_dir: Path, seed: int, faults: list[Fault]) -> None:
    async def main() -> None:
        world = sampling_world(tiny_model_dir, seed, faults)
        limits = {"heartbeat_limit_s": 3.0, "step_limit_s": 4.0}
        async with world.runtime(prefill=2, decode=2, local_prefill="never", **limits) as runtime:
            await serve_some(world, runtime)

    run_virtually(main())


def test_prefill_s_end_of_the_text_is_not_the_request_s(tiny_model_dir: Path) -> None:
    """Prefill stops at its token; decode, which samples for itself, is the one to say so."""

    async def main() -> None:
        world = sampling_world(tiny_model_dir)
        async with world.runtime(local_prefill="never") as runtime:
            prompt_ids = world.prompt(50)
            first = next_token(prompt_ids)
            answer = await ask(runtime, request_for(prompt_ids, 8, stop_token_ids=(first,)), prompt_ids)
            assert (answer.token_ids, answer.finish_reason) == ([first], "stop")
            await world.settle(runtime)
            assert world.points["decode", "committed"] == 1
            assert b'dynrt_handoffs_total{outcome="committed"} 1.0' in runtime.metrics_text()
            assert value(runtime.metrics_text().decode(), "vllm:generation_tokens_total") == 1.0

    run_virtually(main())


def test_prefill_s_error_is_the_request_s(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = sampling_world(tiny_model_dir)
        async with world.runtime(local_prefill="never") as runtime:
            world.living("prefill")[0].fails_prompts = True
            prompt_ids = world.prompt(50)
            with pytest.raises(EngineError, match="told to fail"):
                await ask(runtime, request_for(prompt_ids, 8), prompt_ids)

    run_virtually(main())


def test_time_to_first_token_is_decode_s(tiny_model_dir: Path) -> None:
    """And the exposed time is still counted from the end of prefill's compute."""

    async def main() -> None:
        world = sampling_world(tiny_model_dir)
        world.on_spawn = lambda engine: setattr(
            engine, "host", "simulated"
        )  # as its handoffs' clock is called
        async with world.runtime(local_prefill="never") as runtime:
            world.living("decode")[0].slowness = 1000.0
            await served(runtime, world, 50, 1)
            text = runtime.metrics_text().decode()
            ttft_s = value(text, "dynrt_ttft_seconds_sum")
            assert ttft_s > value(text, "dynrt_decode_first_step_seconds_sum") > 1.0
            assert 0.0 < value(text, "dynrt_handoff_exposed_seconds_sum") < 0.5

    run_virtually(main())


def value(metrics_text: str, name: str) -> float:
    return next(
        float(line.split()[-1])
        for line in metrics_text.splitlines()
        if line.startswith((name + " ", name + "{"))
    )
