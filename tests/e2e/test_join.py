"""`dynrt engine --join`: engines started by hand serve, outlive their runtime, and find the next one."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from live_server import (
    Command,
    client_of,
    command,
    complete,
    completion,
    eventually,
    holds_nothing,
    metrics_of,
    prompt,
    serving,
    texts_of,
)
from process_tree import is_alive
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NO_ENGINES = ("--prefill", 0, "--decode", 0, "--local-prefill", "never")
END_S = 10.0


@asynccontextmanager
async def joining(folder: Path, model: Path, address: str, role: str) -> AsyncIterator[Command]:
    """`dynrt engine --join`, started."""
    arguments = ("engine", model, "--join", address, "--role", role, "--dtype", "float32")
    async with command(folder / f"{role}.log", *arguments) as engine:
        yield engine


async def test_joined_engines_outlive_their_runtime(tiny_model_dir: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    arguments = (tiny_model_dir, *NO_ENGINES, "--control", address)
    async with (
        joining(tmp_path, tiny_model_dir, address, "prefill") as prefill,
        joining(tmp_path, tiny_model_dir, address, "decode") as decode,
    ):
        async with serving(tmp_path / "first", *arguments) as first, client_of(first.url) as session:
            await first.logged("pair connected")
            expected = await complete(session, prompt(200), 20)
            body = completion(prompt(30), 1900, stream=True)
            async with session.post("/v1/completions", json=body) as response:
                texts = texts_of(response)
                for _ in range(3):  # from decode: the handoff is over, and its request would go on for long
                    await anext(texts)
                first.signal(signal.SIGKILL)
                await first.status()
        assert is_alive(prefill.pid) and is_alive(decode.pid)

        async with serving(tmp_path / "second", *arguments) as second, client_of(second.url) as session:
            await second.logged("pair connected")
            assert await complete(session, prompt(200), 20, cache_salt="cold") == expected
            assert (await metrics_of(session))['dynrt_handoffs_total{outcome="committed"}'] >= 1
            await eventually(lambda: is_at_rest(session))

            prefill.signal(signal.SIGKILL)
            await second.logged("worker lost")
            assert await complete(session, prompt(200), 20, cache_salt="colder") == expected
            second.signal(signal.SIGTERM)
            assert await second.status(END_S) == 0, "an orderly end does not take joined engines along"
        assert is_alive(decode.pid)
        decode.signal(signal.SIGTERM)
        assert await decode.status(END_S) == 0


async def is_at_rest(session: aiohttp.ClientSession) -> bool:
    """What the first runtime asked for was dropped, too."""
    return holds_nothing(await metrics_of(session))


async def test_an_engine_of_another_model_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    other_model = write_tiny_model(tmp_path / "other", num_layers=1)
    arguments = ("serve", tiny_model_dir, "--port", 0, *NO_ENGINES, "--control", address)
    async with (
        command(tmp_path / "log", *arguments) as server,
        joining(tmp_path, other_model, address, "both") as engine,
    ):
        assert await engine.status() == 2
        assert "dynrt: engine serves model 'other', this runtime 'llama'" in engine.log
        await server.logged("engine refused")


async def test_a_tcp_address_needs_its_key(tiny_model_dir: Path, tmp_path: Path) -> None:
    arguments = (*NO_ENGINES, "--control", "tcp://127.0.0.1:0")
    async with command(tmp_path / "log", "serve", tiny_model_dir, "--port", 0, *arguments) as server:
        await server.logged("address=tcp://")
        [address] = re.findall(r"address=(tcp://127\.0\.0\.1:\d+#.{40})", server.log)
        async with (
            joining(tmp_path, tiny_model_dir, address.partition("#")[0], "prefill") as keyless,
            joining(tmp_path, tiny_model_dir, address, "both"),
        ):
            await server.ready()
            async with client_of(server.url) as session:
                assert await complete(session, prompt(40), 8)
            assert await keyless.status() == 2
            assert "lacks the runtime's key" in keyless.log


async def test_an_engine_killed_as_it_joins(tiny_model_dir: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    arguments = ("serve", tiny_model_dir, "--port", 0, *NO_ENGINES, "--control", address)
    async with command(tmp_path / "log", *arguments) as server:
        async with joining(tmp_path, tiny_model_dir, address, "both") as engine:
            await server.logged("worker registered")
            engine.signal(signal.SIGKILL)
            await asyncio.gather(server.logged("worker lost"), engine.status())
        async with joining(tmp_path, tiny_model_dir, address, "decode"):
            await server.ready()
