"""`dynrt serve --engine vllm --kv-connector nixl-pull`, through HTTP: vLLM's own NixlConnector moves all KV."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from live_server import Command, caught, client_of, completion, eventually, holds_nothing, metrics_of, prompt
from tiny_model import write_tiny_model
from vllm_serving import ANSWER_S, LONG, MARKS, START_S, serve_command

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]

LEASE_S = 45.0  # vLLM's on a prompt that nobody reads is 30 s; the machine may be busy
CHUNK = 32  # tokens in a step


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Command]:
    folder = tmp_path_factory.mktemp("own")
    model_dir = write_tiny_model(folder / "llama", hidden=256, head_size=32)
    options = ["--kv-connector", "nixl-pull", "--kv-blocks", 64, "--max-batch-tokens", CHUNK]
    async with serve_command(folder / "log", model_dir, *options) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def session(server: Command) -> AsyncIterator[aiohttp.ClientSession]:
    """At the end of a test, all blocks are free on both engines."""
    async with client_of(server.url) as session:
        yield session
        await eventually(lambda: is_at_rest(session), LEASE_S)


async def is_at_rest(session: aiohttp.ClientSession) -> bool:
    return holds_nothing(await metrics_of(session))


async def token_ids(
    session: aiohttp.ClientSession, prompt_ids: list[int], max_tokens: int = 24, **fields: Any
) -> list[int]:
    body = completion(prompt_ids, max_tokens, return_token_ids=True, **fields)
    limit = aiohttp.ClientTimeout(ANSWER_S)
    async with session.post("/v1/completions", json=body, timeout=limit) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids


async def alone(session: aiohttp.ClientSession, prompt_ids: list[int]) -> list[int]:
    """What decode answers if it computes the prompt itself, without a prefix hit."""
    return await token_ids(session, prompt_ids, dynrt={"local_prefill": "always"}, cache_salt="alone")


async def committed(session: aiohttp.ClientSession) -> float:
    return (await metrics_of(session))['dynrt_handoffs_total{outcome="committed"}']


def pids(server: Command) -> dict[str, int]:
    """The engines' process ids, by worker: of each the one that registered last."""
    found = re.findall(r"worker registered worker=(\S+) .*pid=(\d+)", server.log)
    return {worker: int(pid) for worker, pid in found}


@pytest.mark.parametrize("num_tokens", [1, 31, 33, 64, 500])
async def test_pulled_is_computed_alone(session: aiohttp.ClientSession, num_tokens: int) -> None:
    prompt_ids = prompt(num_tokens, seed=num_tokens)
    expected = await alone(session, prompt_ids)
    committed_before = await committed(session)
    assert await token_ids(session, prompt_ids, cache_salt="pulled") == expected
    again = await token_ids(session, [*prompt_ids, 7], cache_salt="pulled")  # hits on both engines
    assert again == await alone(session, [*prompt_ids, 7])
    assert await committed(session) == committed_before + 2, "decode computed a prompt's last token, no other"


async def test_several_at_once(session: aiohttp.ClientSession) -> None:
    prompts = [prompt(20 + 45 * number, seed=50 + number) for number in range(6)]
    expected = [await alone(session, prompt_ids) for prompt_ids in prompts]
    committed_before = await committed(session)
    answers = await asyncio.gather(*(token_ids(session, ids, cache_salt="at once") for ids in prompts))
    assert answers == expected
    assert await committed(session) == committed_before + len(prompts)


@pytest.mark.parametrize(
    ("worker", "num_tokens", "max_tokens"), [("decode-0", 40, 1900), ("prefill-0", LONG, 24)]
)
async def test_client_that_leaves(
    session: aiohttp.ClientSession, worker: str, num_tokens: int, max_tokens: int
) -> None:
    """While decode generates, and while prefill computes."""
    answer = await begun(session, worker, prompt(num_tokens, seed=num_tokens), max_tokens)
    answer.cancel()
    await asyncio.wait([answer])


async def begun(
    session: aiohttp.ClientSession, worker: str, prompt_ids: list[int], max_tokens: int = 24
) -> asyncio.Task[list[int]]:
    """A request that `worker` was seen to run, without prefix hits."""

    def ask() -> Coroutine[Any, Any, list[int]]:
        return token_ids(session, prompt_ids, max_tokens, cache_salt=secrets.token_hex(4))

    return await caught(lambda: runs(session, worker), ask, ANSWER_S)


async def runs(session: aiohttp.ClientSession, worker: str) -> bool:
    return (await metrics_of(session))[f'dynrt_worker_requests{{state="running",worker="{worker}"}}'] > 0


async def test_prefill_killed_while_it_computes(session: aiohttp.ClientSession, server: Command) -> None:
    prompt_ids = prompt(LONG, seed=1)
    expected = await alone(session, prompt_ids)
    answer = await begun(session, "prefill-0", prompt_ids)
    await kill_prefill(server)
    assert await answer == expected


async def test_prefill_gone_before_decode_has_read(session: aiohttp.ClientSession, server: Command) -> None:
    """It hangs, so that decode computes the prompt; it dies, so that the request starts again; both before they met."""
    await eventually(lambda: server.log.count("pair connected") == 2, START_S)
    first, second = prompt(200, seed=2), prompt(200, seed=3)
    expected = [await alone(session, prompt_ids) for prompt_ids in (first, second)]
    failed_before = (await metrics_of(session))['dynrt_handoffs_total{outcome="failed"}']

    async with unread(session, server, first) as answer:
        os.kill(pids(server)["prefill-0"], signal.SIGSTOP)
    await server.logged("handshake_failed", ANSWER_S)
    os.kill(pids(server)["prefill-0"], signal.SIGCONT)
    assert await answer == expected[0]
    failed = (await metrics_of(session))['dynrt_handoffs_total{outcome="failed"}']
    assert failed == failed_before + 1, "decode tells that it had to compute"

    async with unread(session, server, second) as answer:
        await kill_prefill(server)
    assert await answer == expected[1]


@asynccontextmanager
async def unread(
    session: aiohttp.ClientSession, server: Command, prompt_ids: list[int]
) -> AsyncIterator[asyncio.Task[list[int]]]:
    """A request whose prompt waits on prefill, to be read by decode, which stands still in the body."""
    decode = pids(server)["decode-0"]
    kept_before = await kept_blocks(session)
    os.kill(decode, signal.SIGSTOP)
    try:
        answer = asyncio.create_task(token_ids(session, prompt_ids, cache_salt="unread"))
        await eventually(lambda: keeps_more(session, kept_before), ANSWER_S)
        yield answer
    finally:
        os.kill(decode, signal.SIGCONT)


async def keeps_more(session: aiohttp.ClientSession, kept_before: float) -> bool:
    return await kept_blocks(session) > kept_before and not await runs(session, "prefill-0")


async def kept_blocks(session: aiohttp.ClientSession) -> float:
    return (await metrics_of(session))['dynrt_kv_blocks{state="active",worker="prefill-0"}']


async def kill_prefill(server: Command) -> None:
    num_lost = server.log.count("worker lost")
    os.kill(pids(server)["prefill-0"], signal.SIGKILL)
    await eventually(lambda: server.log.count("worker lost") > num_lost)
