"""dynrt over vLLM engines, each prompt handed off, answers as vLLM's own server: a row for each kind of request."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from live_server import client_of, eventually
from vllm_answers import differences, streamed_answer, whole_answer
from vllm_environment import vllm_command
from vllm_requests import REQUESTS
from vllm_serving import MARKS, START_S, serve_command

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]

ANSWERS_S = 300.0
ENGINE_ARGUMENTS = {"max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}
# dynrt's pools differ in tokens of one step and in memory.
OUR_OPTIONS = ["--max-batch-tokens", 256, "--engine-arg", "decode:max_num_batched_tokens=512"]
OUR_OPTIONS += ["--engine-arg", f"prefill:kv_cache_memory_bytes={128 << 20}"]
THEIR_CHUNK = 4096  # their CPU worker ends over a seed whose prompt takes more than one step
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
STREAMED = [
    name for name, (_, body) in REQUESTS.items() if "prompt_logprobs" not in body
]  # neither streams these

Answers = dict[str, dict[str, Any]]
Ask = Callable[[aiohttp.ClientSession, str, dict[str, Any]], Awaitable[dict[str, Any]]]


async def answers(url: str, ask: Ask, names: Iterable[str] = REQUESTS) -> Answers:
    """To these requests, asked at once."""
    async with client_of(url) as session:
        session._timeout = aiohttp.ClientTimeout(ANSWERS_S)
        told = await asyncio.gather(*(ask(session, *REQUESTS[name]) for name in names))
    return dict(zip(names, told, strict=True))


@asynccontextmanager
async def own_server(model_dir: Path, log: Path) -> AsyncIterator[str]:
    """vLLM's, of the same engine arguments; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {**ENGINE_ARGUMENTS, "model": model_dir, "served_model_name": "m", "dtype": "float32"}
    options |= {
        "max_num_batched_tokens": THEIR_CHUNK,
        "block_size": 32,
        "generation_config": "vllm",
        "host": "127.0.0.1",
        "port": port,
    }
    pairs = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    program = vllm_command("python", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *pairs)
    with log.open("wb") as output:
        server = await asyncio.create_subprocess_exec(
            *program, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await eventually(lambda: is_up(url, server), START_S)
        assert server.returncode is None, f"vLLM's server has ended; {log} says why"
        yield url
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()


async def is_up(url: str, server: asyncio.subprocess.Process) -> bool:
    """Or has ended."""
    if server.returncode is not None:
        return True
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def theirs(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    log = tmp_path_factory.mktemp("own") / "log"
    async with own_server(default_model_dir, log) as url:
        return await answers(url, whole_answer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    """Whole and streamed."""
    log = tmp_path_factory.mktemp("ours") / "log"
    options = list(OUR_OPTIONS)
    for name, value in ENGINE_ARGUMENTS.items():
        options += ["--engine-arg", f"{name}={value}"]
    async with serve_command(log, default_model_dir, *options) as server:
        whole = await answers(server.url, whole_answer)
        return whole, await answers(server.url, streamed_answer, STREAMED)


@pytest.mark.parametrize("name", REQUESTS)
async def test_whole_answer_is_the_same(name: str, theirs: Answers, ours: tuple[Answers, Answers]) -> None:
    assert differences(ours[0][name], theirs[name]) == []


@pytest.mark.parametrize("name", STREAMED)
async def test_streamed_answer_is_the_same(name: str, theirs: Answers, ours: tuple[Answers, Answers]) -> None:
    streamed = ours[1][name]
    assert differences(streamed, {field: theirs[name][field] for field in streamed}) == []
