"""Decode workers without room for finished prompts: each goes elsewhere in time, whoever dies, leaves or is late."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_engine import Harm, SimEngine
from sim_world import Fault, SimWorld, ask, request_for, served

from dynrt.runtime.runtime import Runtime
from dynrt.runtime.virtual_time import run_virtually

LIMITS = {"local_prefill": "never", "heartbeat_limit_s": 3.0, "step_limit_s": 4.0}
LONGEST_S = 20.0  # a request as here, tried on every decode worker and moved by a death or two


def retargets(runtime: Runtime, outcome: str) -> int:
    line = f'dynrt_handoff_retargets_total{{outcome="{outcome}"}} '
    text = runtime.metrics_text().decode()
    return int(float(next(row for row in text.splitlines() if row.startswith(line)).split()[-1]))


def fill(engine: SimEngine, spare: bool = False) -> None:
    if engine.role == "decode" and not spare:
        engine.fill()


@pytest.mark.parametrize("samplers", [frozenset(), frozenset({"decode"})])
def test_a_full_worker_s_prompts_are_decoded_on_another(
    tiny_model_dir: Path, samplers: frozenset[str]
) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        world.samplers = samplers
        async with world.runtime(decode=2, **LIMITS) as runtime:
            full, _ = world.living("decode")
            full.fill()
            await asyncio.gather(*(served(runtime, world, 30 * n + 1, 1 + 3 * n) for n in range(8)))
            assert retargets(runtime, "moved") > 0 and retargets(runtime, "local") == 0
            assert len(world.living()) == 3, "nobody had to be killed for it"
            assert b'dynrt_prefill_tokens_total{source="computed"}' in runtime.metrics_text()

    run_virtually(main())


@pytest.mark.parametrize("samplers", [frozenset(), frozenset({"decode"})])
def test_prefill_decodes_on_where_there_is_no_room_at_all(
    tiny_model_dir: Path, samplers: frozenset[str]
) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        world.samplers = samplers
        world.on_spawn = fill
        async with world.runtime(decode=2, **LIMITS) as runtime:
            await served(runtime, world, 90, 6)
            assert (retargets(runtime, "moved"), retargets(runtime, "local")) == (1, 1)
            assert asyncio.get_running_loop().time() < 5.0

    run_virtually(main())


def test_the_only_decode_worker_is_waited_for_longer(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(**LIMITS) as runtime:
            (decode,) = world.living("decode")
            decode.fill()
            asyncio.get_running_loop().call_later(4.0, decode.fill, False)
            await served(runtime, world, 90, 6)
            assert retargets(runtime, "local") == 0
            decode.fill()
            await served(runtime, world, 90, 6)
            assert retargets(runtime, "local") == 1

    run_virtually(main())


def test_a_client_that_reads_nothing_holds_the_prompt_no_longer_than_its_lease(tiny_model_dir: Path) -> None:
    """And is served all the same when it comes back."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        world.on_spawn = fill
        async with world.runtime(decode=2, **LIMITS) as runtime:
            prompt_ids = world.prompt(90)
            outputs = runtime.generate(request_for(prompt_ids, 6))
            token_ids = (await anext(outputs)).token_ids
            await asyncio.sleep(40.0)
            assert world.living("prefill")[0].is_idle
            for decode in world.living("decode"):
                decode.fill(False)
            async for output in outputs:
                token_ids += output.token_ids
            assert token_ids == (await ask(runtime, request_for(prompt_ids, 6), prompt_ids)).token_ids

    run_virtually(main())


POINTS = [
    ("prefill", "retargeted"),
    ("prefill", "armed"),
    ("prefill", "write posted"),
    ("prefill", "submitted generate"),
    ("decode", "handoff cancelled"),
    ("decode", "submitted reserve"),
    ("decode", "reserved"),
    ("decode", "committed"),
]


@pytest.mark.parametrize("harm", ["crash", "hang", "stall", "jam"])
@pytest.mark.parametrize(("role", "point"), POINTS)
def test_any_of_the_three_workers_may_die_meanwhile(
    tiny_model_dir: Path, role: str, point: str, harm: Harm
) -> None:
    for nth, num_full in ((1, 1), (2, 1), (1, 2), (2, 2)):

        async def main(nth: int = nth, num_full: int = num_full) -> None:
            world = SimWorld(tiny_model_dir, nth, [Fault(role, point, harm, nth)])
            async with world.runtime(decode=2, **LIMITS) as runtime:
                for decode in world.living("decode")[:num_full]:
                    decode.fill()
                await asyncio.gather(*(served(runtime, world, 20 + 40 * n, 8) for n in range(4)))
                for decode in world.living("decode"):
                    decode.fill(False)

        run_virtually(main())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), after_s=st.floats(0.0, 4.0), samplers=st.sampled_from(["", "decode"]))
def test_a_client_leaves_at_any_time(tiny_model_dir: Path, seed: int, after_s: float, samplers: str) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir, seed)
        world.samplers = frozenset({samplers})
        world.on_spawn = lambda engine: fill(engine, spare=seed % 2 == 0 and engine.pid == 1001)
        async with world.runtime(decode=2, **LIMITS) as runtime:
            other = asyncio.create_task(served(runtime, world, 80, 10))
            client = asyncio.create_task(served(runtime, world, 200, 10))
            await asyncio.sleep(after_s)
            client.cancel()
            with suppress(asyncio.CancelledError):
                await client
            await other
            await world.settle(runtime)
            assert len(world.living()) == 3, "nobody had to be killed for it"

    run_virtually(main())


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    faults=st.lists(
        st.builds(
            lambda at, harm, nth: Fault(*at, harm, nth),
            st.sampled_from(POINTS),
            st.sampled_from(["crash", "hang", "stall", "jam"]),
            st.integers(1, 6),
        ),
        max_size=2,
    ),
)
def test_room_comes_and_goes(tiny_model_dir: Path, seed: int, faults: list[Fault]) -> None:
    """A late answer of a worker that was told to forget crosses with all the rest."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir, seed, faults)
        async with world.runtime(prefill=2, decode=3, **LIMITS) as runtime:
            tide = asyncio.create_task(ebb_and_flow(world, Random(seed)))
            async with asyncio.timeout(4 * LONGEST_S):
                await asyncio.gather(*(served(runtime, world, 20 + 30 * n, 8) for n in range(6)))
            tide.cancel()
            for decode in world.living("decode"):
                decode.fill(False)

    run_virtually(main())


async def ebb_and_flow(world: SimWorld, random: Random) -> None:
    while True:
        for decode in world.living("decode"):
            decode.fill(random.random() < 0.7)
        await asyncio.sleep(random.uniform(0.01, 2.0))
