"""vLLM and native engines in one fleet, with the default model: they cannot hand off on a CPU, and all is served."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from live_server import Command, client_of, command, complete, metrics_of
from vllm_serving import MARKS, START_S, dynrt_where_vllm_is

from dynrt.runtime.fleet import MISFITS

pytestmark = MARKS

END_S = 20.0
PROMPT_IDS = list(range(1000, 1040))
NATIVE_ORDER, VLLM_ORDER = "block,kv,token,head,dim", "block,head,vllm-cpu-"


@asynccontextmanager
async def vllm_engine(log: Path, model_dir: Path, address: str) -> AsyncIterator[Command]:
    """`dynrt engine --engine vllm --role both`, as it joins whoever serves at `address`."""
    options = ["--engine", "vllm", "--role", "both", "--dtype", "float32", "--threads", 1, "--kv-blocks", 64]
    engine = command(log, "engine", model_dir, "--join", address, *options)
    with dynrt_where_vllm_is():
        running = await engine.__aenter__()
    try:
        yield running
    finally:
        await engine.__aexit__(None, None, None)


@asynccontextmanager
async def native(log: Path, model_dir: Path, address: str, **pools: int) -> AsyncIterator[Command]:
    """`dynrt serve` with native engines, ended in good order."""
    options: list[Any] = [model_dir, "--port", 0, "--dtype", "float32", "--threads", 1, "--control", address]
    for pool, size in pools.items():
        options += [f"--{pool}", size]
    async with command(log, "serve", *options) as server:
        await server.ready()
        yield server
        server.signal(signal.SIGTERM)
        assert await server.status(END_S) == 0


async def answer(server: Command) -> tuple[str, dict[str, float]]:
    """The text of a prompt that is to be handed off, and what was counted."""
    async with client_of(server.url) as session:
        text = await complete(session, PROMPT_IDS, 12, dynrt={"local_prefill": "never"})
        return text, await metrics_of(session)


def misfit(server: Command) -> tuple[str, str, str, str]:
    """The pair that the log tells of: prefill and decode worker, and the order of each."""
    told = (
        rf"{MISFITS} prefill=(\S+) decode=(\S+) because=\"order is '(\S+)' on prefill and '(\S+)' on decode\""
    )
    found: tuple[str, str, str, str] = re.findall(told, server.log)[0]
    return found


async def test_each_way_round(default_model_dir: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    async with vllm_engine(tmp_path / "vllm.log", default_model_dir, address):
        async with native(tmp_path / "1.log", default_model_dir, address, prefill=1, decode=0) as server:
            await server.logged(MISFITS, START_S)
            prefill, decode, sent, wanted = misfit(server)
            assert (prefill, sent) == ("prefill-0", NATIVE_ORDER)
            assert decode.startswith("both-") and wanted.startswith(VLLM_ORDER)
            of_vllm, counted = await answer(server)
            assert counted['dynrt_plan_reasons_total{reason="no connected pair"}'] == 1
        async with native(tmp_path / "2.log", default_model_dir, address, prefill=0, decode=1) as server:
            await server.logged(MISFITS, START_S)
            prefill, decode, sent, wanted = misfit(server)
            assert prefill.startswith("both-") and sent.startswith(VLLM_ORDER)
            assert (decode, wanted) == ("decode-0", NATIVE_ORDER)
            of_either, counted = await answer(server)
            assert of_either == of_vllm
            assert not any(
                counted[f'dynrt_handoffs_total{{outcome="{end}"}}'] for end in ("committed", "failed")
            )
