"""Many streams at once, and clients that leave: everything ends, and nothing stays behind on any worker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from live_server import (
    Embedded,
    client_of,
    complete,
    completion,
    embedded,
    eventually,
    is_clean,
    prompt,
    texts_of,
)
from process_tree import open_fds, orphaned_shared_memory

from dynrt.runtime import Runtime, RuntimeConfig

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CANCEL_LIMIT_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tiny_model_dir: Path) -> AsyncIterator[Embedded]:
    config = RuntimeConfig(
        model=str(tiny_model_dir),
        dtype="float32",
        local_prefill="never",
        kv_blocks=512,  # 64 requests do not fit at once: some wait, some are preempted
        max_batch_tokens=128,
    )
    async with embedded(config) as live:
        async with client_of(live.url) as session:
            await complete(session, prompt(40), 2)
        await eventually(lambda: is_clean(live.runtime))
        yield live


async def test_64_streams_of_mixed_length_leave_nothing_behind(live: Embedded) -> None:
    fds_before, shm_before = await fds_of(live), orphaned_shared_memory()
    draw = random.Random(64)
    shapes = [(draw.choice((1, 31, 32, 33, 200, 700, 1500)), draw.randrange(1, 48)) for _ in range(64)]
    bodies = [(prompt(num_tokens, seed), max_tokens) for seed, (num_tokens, max_tokens) in enumerate(shapes)]
    async with client_of(live.url) as session:
        began = time.monotonic()
        together = await asyncio.gather(*(complete(session, *body) for body in bodies))
        print(f"64 streams in {time.monotonic() - began:.2f} s")
        await eventually(lambda: is_clean(live.runtime))
        for body, text in list(zip(bodies, together, strict=True))[::8]:
            assert await complete(session, *body) == text, "alone, the answer is another one"
    await eventually(lambda: is_clean(live.runtime))
    await eventually(lambda: holds_fds(live, fds_before))
    assert orphaned_shared_memory() <= shm_before


async def test_a_client_that_leaves_before_the_first_token(live: Embedded) -> None:
    async with client_of(live.url) as session:
        posts = [
            asyncio.create_task(session.post("/v1/completions", json=completion(prompt(1900, seed), 16)))
            for seed in range(8)
        ]
        await eventually(lambda: is_at_work(live.runtime, 8))
        assert not any(post.done() for post in posts[1:])
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        print(f"cancelled in {await eventually(lambda: is_clean(live.runtime), CANCEL_LIMIT_S):.3f} s")


async def test_a_client_that_leaves_in_mid_stream(live: Embedded) -> None:
    async with client_of(live.url) as session:
        body = completion(prompt(100), 1900, stream=True)
        async with session.post("/v1/completions", json=body) as response:
            async for _ in texts_of(response):
                break
            assert await is_at_work(live.runtime, 1)
            response.close()
        print(f"cancelled in {await eventually(lambda: is_clean(live.runtime), CANCEL_LIMIT_S):.3f} s")


async def is_at_work(runtime: Runtime, num_requests: int) -> bool:
    """So many requests are open, and the workers have some of them."""
    return f"dynrt_open_requests {num_requests:.1f}" in runtime.metrics_text().decode() and any(
        status.requests for status in (await runtime.status()).values()
    )


async def fds_of(live: Embedded) -> dict[str, int]:
    """Open file descriptors of this process and of each worker."""
    statuses = await live.runtime.status()
    return {"runtime": open_fds()} | {worker: status.open_fds for worker, status in statuses.items()}


async def holds_fds(live: Embedded, expected: dict[str, int]) -> bool:
    return await fds_of(live) == expected
