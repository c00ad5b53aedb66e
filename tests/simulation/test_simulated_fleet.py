"""Workers that come, go, hang and join in virtual time: restarts, bounds, waiting, and the end of the runtime."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from sim_engine import SimEngine
from sim_world import SimWorld, request_for, served, until

from dynrt.runtime.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    WorkerLostError,
)
from dynrt.runtime.virtual_time import run_virtually


def crash_at_once(engine: SimEngine) -> None:
    asyncio.get_running_loop().call_later(1e-3, engine.harm, "crash")


def test_restarts_follow_the_policy_until_the_engine_is_given_up(tiny_model_dir: Path) -> None:
    """Pauses double from 0.1 s; after five restarts within a minute there is no sixth, and decode serves alone."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime() as runtime:
            world.on_spawn = crash_at_once
            world.living("prefill")[0].harm("crash")
            await asyncio.sleep(120.0)
            gaps_s = [after - before for before, after in pairwise(world.spawned_at[2:])]
            assert gaps_s == pytest.approx([0.2, 0.4, 0.8, 1.6], abs=0.01)
            assert [engine.role for engine in world.living()] == ["decode"]
            await served(runtime, world, 60, 4)

    run_virtually(main())


def test_engine_that_never_registers_ends_the_start(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        world.on_spawn = crash_at_once
        with pytest.raises(ConfigError, match="ended with status -11 before it was ready"):
            async with world.runtime():
                pytest.fail("it started")
        assert world.living() == []

    run_virtually(main())


def test_start_that_takes_too_long_names_what_is_missing(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        world.on_spawn = lambda engine: engine.harm("hang") if engine.role == "decode" else None
        with pytest.raises(ConfigError, match="decode-0 is missing"):
            async with world.runtime():
                pytest.fail("it started")
        assert world.living() == []

    run_virtually(main())


def test_request_waits_for_a_worker_that_comes_back(tiny_model_dir: Path) -> None:
    """Both engines go in the middle of its answer; it goes on with the ones that replace them."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime() as runtime:
            request = asyncio.create_task(served(runtime, world, 60, 50))
            await until(lambda: ("decode", "step ended") in world.points, "it decodes")
            for engine in world.living():
                engine.harm("crash")
            await request
        assert len(world.engines) == 4

    run_virtually(main())


def test_workers_that_go_down_together_cost_no_request(tiny_model_dir: Path) -> None:
    """Their ends are seen one behind the other, and until then requests are moved to them."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(decode=4) as runtime:
            requests = [asyncio.create_task(served(runtime, world, 60, 50)) for _ in range(12)]
            await until(lambda: all(not engine.is_idle for engine in world.living("decode")), "all decode")
            doomed = world.living("decode")
            for engine in doomed:
                engine.harm("hang")
            for engine in doomed:
                engine.harm("crash")
                await asyncio.sleep(0.02)
            await asyncio.gather(*requests)

    run_virtually(main())


def test_request_fails_clearly_when_no_worker_comes_back(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(prefill=0, no_worker_wait_s=4.0) as runtime:
            request = asyncio.create_task(served(runtime, world, 60, 50))
            await asyncio.sleep(0.02)
            world.on_spawn = lambda engine: engine.harm("hang")
            world.living()[0].harm("crash")
            with pytest.raises(NoWorkerError, match="no worker is up"):
                await request
            asked_at = asyncio.get_running_loop().time()
            with pytest.raises(NoWorkerError, match="no worker is up"):
                await served(runtime, world, 60, 50)
            assert asyncio.get_running_loop().time() >= asked_at + 4.0, "it was not waited for"

    run_virtually(main())


def test_attempts_are_bounded(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(prefill=0, max_attempts=2) as runtime:
            request = asyncio.create_task(served(runtime, world, 60, 500))
            for _ in range(2):
                await until(lambda: any(not engine.is_idle for engine in world.living()), "it is somewhere")
                world.living()[0].harm("crash")
            with pytest.raises(WorkerLostError, match="gave up after 2 attempts: its decode worker was lost"):
                await request

    run_virtually(main())


def test_refused_reservations_are_told(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(local_prefill="never") as runtime:
            world.living("decode")[0].refuses_reservations = "for now"
            with pytest.raises(WorkerLostError, match="3 attempts: its handoff failed: told to refuse"):
                await served(runtime, world, 60, 5)
            world.living("decode")[0].refuses_reservations = "for good"
            with pytest.raises(InvalidRequestError, match="told to refuse"):
                await served(runtime, world, 60, 5)
            await served(runtime, world, 60, 5, local_prefill="always")

    run_virtually(main())


def test_what_cannot_be_served_is_refused_at_the_door(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(max_open_requests=1) as runtime:
            with pytest.raises(ContextLengthError, match="1000 tokens and max_tokens is 25"):
                await served(runtime, world, 1000, 25)
            open_one = runtime.generate(request_for(world.prompt(20), 5))
            await anext(open_one)
            with pytest.raises(OverloadedError, match="1 requests are open, the limit"):
                await served(runtime, world, 20, 5)
            await open_one.aclose()
            runtime.drain()
            with pytest.raises(OverloadedError, match="shutting down"):
                await served(runtime, world, 20, 5)

    run_virtually(main())


def test_full_outbox_is_a_hang_of_that_worker_only(tiny_model_dir: Path) -> None:
    """Long before its heartbeats are missed, the messages it does not take end it."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir, outbox_limit=6)
        async with world.runtime(decode=2, local_prefill="never", heartbeat_limit_s=1e6) as runtime:
            hung = world.living("decode")[0]
            hung.harm("hang")
            await asyncio.gather(*(served(runtime, world, 40, 5) for _ in range(16)))
            assert not hung.is_alive
            await world.complete(runtime, 3)

    run_virtually(main())


def test_worker_lost_while_another_has_a_full_outbox(tiny_model_dir: Path) -> None:
    """The news that one is dead fills the outbox of another: that one ends too, and the runtime goes on."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir, outbox_limit=0)
        async with world.runtime(heartbeat_limit_s=1e6) as runtime:
            world.living("decode")[0].harm("hang")
            world.living("prefill")[0].harm("crash")
            await world.complete(runtime, 2)
            await served(runtime, world, 60, 4)
        assert len(world.engines) == 4

    run_virtually(main())


def test_runtime_ends_while_an_engine_hangs_with_a_full_outbox(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir, outbox_limit=0)
        async with world.runtime(heartbeat_limit_s=1e6):
            world.living("decode")[0].harm("hang")

    run_virtually(main())


def test_slow_engine_is_not_a_hung_one(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(heartbeat_limit_s=3.0, step_limit_s=60.0) as runtime:
            for engine in world.living():
                engine.slowness = 1000.0  # steps of many seconds
            await served(runtime, world, 100, 3)
        assert len(world.engines) == 2

    run_virtually(main())


def test_engine_that_joined_serves_and_outlives_the_runtime(tiny_model_dir: Path) -> None:
    """And registers with the runtime that comes after at the same address."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        joined = world.join("both")
        for _ in range(2):
            async with world.runtime(prefill=0, decode=0, control="sim://control") as runtime:
                await world.complete(runtime, 1)
                await served(runtime, world, 60, 4)
            assert joined.is_alive

    run_virtually(main())


def test_hung_engine_that_joined_does_not_hold_up_the_end(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        joined = world.join("decode")
        async with world.runtime(heartbeat_limit_s=1e6) as runtime:
            await world.complete(runtime, 3)
            joined.harm("hang")
        assert joined.is_alive, "it is not ours to end"

    run_virtually(main())


def test_engine_that_joins_while_the_runtime_ends_does_not_hold_it_up(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.unsettled_runtime(prefill=0):
            world.living("decode")[0].harm("hang")  # so that the end takes a while
            joined = world.join("decode")
        assert world.living() == [joined], "it is not ours to end"

    run_virtually(main())


def test_joined_engine_that_dies_or_hangs_is_lost(tiny_model_dir: Path) -> None:
    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        async with world.runtime(heartbeat_limit_s=3.0) as runtime:
            for harm in ("crash", "hang"):
                joined = world.join("decode")
                await world.complete(runtime, 3)
                joined.harm(harm)
                await world.complete(runtime, 2)
                assert not joined.is_alive
            await served(runtime, world, 60, 4)

    run_virtually(main())


def test_engine_of_another_host_that_leaves_is_lost(tiny_model_dir: Path) -> None:
    """Its process cannot be watched from here: its word counts."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        joined = world.join("decode")
        joined.host = "another"
        async with world.runtime(prefill=0, decode=0, control="sim://control") as runtime:
            await world.complete(runtime, 1)
            request = asyncio.create_task(served(runtime, world, 60, 50))
            await until(lambda: not joined.is_idle, "it is served")
            joined.leave()
            with pytest.raises(NoWorkerError):
                await request

    run_virtually(main())


def test_a_part_that_fails_ends_the_runtime_and_is_raised(tiny_model_dir: Path) -> None:
    """An exception of a part cancels the body, like one of a task group."""

    async def main() -> None:
        world = SimWorld(tiny_model_dir)
        with pytest.raises(AssertionError, match="prefill samples exactly one token"):
            async with world.runtime(local_prefill="never") as runtime:
                world.living("prefill")[0].doubles_first_token = True
                await served(runtime, world, 40, 5)
                pytest.fail("it went on")
        assert world.living() == []

    run_virtually(main())
