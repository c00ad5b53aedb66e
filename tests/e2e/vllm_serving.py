"""vLLM engines that stay up for many tests: where they are started, and what a pair of them must do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import live_server
import pytest
from live_server import Command, command
from oracle import References, assert_all_same, judged
from prompt_set import BLOCK_SIZE
from served_runtime import ServedRuntime, serve
from vllm_environment import vllm_command

from dynrt.runtime import RuntimeConfig, spawner
from dynrt.transfer.options import TransferOptions

MARKS = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),  # the environment may have to be built
]
START_S = 300.0  # importing vLLM takes 10 s of CPU in each process, on a machine that may be busy
ANSWER_S = 120.0
NUM_BLOCKS = 64
LONG = 1500  # tokens, computed in 47 steps


@contextmanager
def dynrt_where_vllm_is() -> Iterator[None]:
    """Both the commands that tests start and the engines that a runtime spawns run in vLLM's environment."""
    program = vllm_command("python", "-P", "-m", "dynrt.runtime.cli")
    with pytest.MonkeyPatch.context() as patch:
        for starter in (live_server, spawner):
            patch.setattr(starter, "dynrt_command", lambda: program)
        yield


@asynccontextmanager
async def serve_pair(model_dir: Path, **settings: Any) -> AsyncIterator[ServedRuntime]:
    """Each block of each layer is compared with what was sent, before its request goes on."""
    config = RuntimeConfig(
        model=str(model_dir),
        engine="vllm",
        dtype="float32",
        threads=1,
        local_prefill="never",
        kv_blocks=NUM_BLOCKS,
        max_batch_tokens=32,
        transfer=TransferOptions(verify=True),
        heartbeat_interval_s=0.2,
        heartbeat_limit_s=10.0,  # the machine may be busy with other things
        **settings,
    )
    with dynrt_where_vllm_is():
        async with serve(config) as served:
            yield served


@asynccontextmanager
async def serve_command(log: Path, model_dir: Path, *options: Any) -> AsyncIterator[Command]:
    """`dynrt serve --engine vllm` and these options, once it is ready."""
    fixed = [
        "--port",
        0,
        "--engine",
        "vllm",
        "--dtype",
        "float32",
        "--threads",
        1,
        "--local-prefill",
        "never",
    ]
    with dynrt_where_vllm_is():
        async with command(log, "serve", model_dir, *fixed, *options) as server:
            line = await server.line(START_S)
            assert line, server.log
            server.url = line.split()[-1]
            yield server


async def answers_of_decode_alone(
    pair: ServedRuntime, model_dir: Path, prompts: dict[str, list[int]], **how: Any
) -> References:
    """One prompt at a time."""
    answers = {
        name: await pair.answer(ids, local_prefill="always", salt="alone", **how)
        for name, ids in prompts.items()
    }
    return judged(model_dir, prompts, answers)


def prompts_of(references: References) -> dict[str, list[int]]:
    return {name: reference.prompt_ids for name, reference in references.items()}


async def check_handoffs_at_once(pair: ServedRuntime, references: References, **how: Any) -> None:
    committed_before = pair.metric("dynrt_handoffs_total", outcome="committed")
    assert_all_same(references, await pair.answers(prompts_of(references), salt="at once", **how))
    committed = pair.metric("dynrt_handoffs_total", outcome="committed") - committed_before
    assert committed == len(references)
    await pair.settle()


async def warm_prefixes(pair: ServedRuntime, references: References) -> dict[str, list[int]]:
    """Prompts of which both workers know all but the last token now."""
    prompts = {name: ids for name, ids in prompts_of(references).items() if len(ids) <= 100}
    await pair.answers(prompts, salt="hits", max_tokens=2)
    await pair.settle()
    return prompts


async def check_prefix_hits(
    pair: ServedRuntime, references: References, prompts: dict[str, list[int]], **how: Any
) -> None:
    answers = await pair.answers(prompts, salt="hits", **how)
    assert_all_same(references, answers)
    for name, prompt_ids in prompts.items():
        hit = (len(prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is always computed
        assert answers[name].cached_tokens == hit, name
    await pair.settle()
