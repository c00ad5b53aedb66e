"""A runtime with real engine processes that stays up for many tests, and what they ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dynrt.runtime import GenerateRequest, Runtime, RuntimeConfig, SamplingParams
from dynrt.runtime.messages import FinishReason, Status, pack_ids
from dynrt.runtime.requests import LocalPrefill

ANSWER_LIMIT_S = 300.0  # the machine may be busy with other things; nothing waits for so long normally
SETTLE_LIMIT_S = 30.0
POLL_S = 0.02


class Answer(msgspec.Struct, frozen=True):
    """All outputs of one request, joined."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    cached_tokens: int
    first_seen: list[int]  # the tokens that the client saw at first


class ServedRuntime:
    """A runtime that is up."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def answer(
        self,
        prompt_ids: Sequence[int],
        *,
        salt: str = "",
        local_prefill: LocalPrefill | None = None,
        seeded: bool = False,
        **sampling: Any,
    ) -> Answer:
        """The whole answer to one prompt: greedy, 64 tokens and past any end of sequence unless told otherwise."""
        params = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, "ignore_eos": True, **sampling})
        request = GenerateRequest(
            pack_ids(prompt_ids), params, salt=salt, seeded=seeded, local_prefill=local_prefill
        )
        async with asyncio.timeout(ANSWER_LIMIT_S):
            outputs = [output async for output in self.runtime.generate(request)]
        return Answer(
            token_ids=[token_id for output in outputs for token_id in output.token_ids],
            text="".join(output.text for output in outputs),
            finish_reason=outputs[-1].finish_reason,
            stop_reason=outputs[-1].stop_reason,
            cached_tokens=outputs[-1].cached_tokens,
            first_seen=outputs[0].token_ids,
        )

    async def answers(self, prompts: dict[str, list[int]], **how: Any) -> dict[str, Answer]:
        """The answers to all of them, asked at once."""
        answers = await asyncio.gather(*(self.answer(prompt_ids, **how) for prompt_ids in prompts.values()))
        return dict(zip(prompts, answers, strict=True))

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics, by its full name. KeyError if there is none."""
        for family in text_string_to_metric_families(self.runtime.metrics_text().decode()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise KeyError(f"{name} {labels}")

    async def preemptions(self) -> dict[str, int]:
        """By worker id, since its start."""
        return {name: status.load.preemptions_total for name, status in (await self.runtime.status()).items()}

    async def settle(self) -> None:
        """Until nothing of any request is left, here or in an engine. Fails, telling what is left, if it stays."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_LIMIT_S
        left: dict[str, Status] = {}
        while not self.runtime.idle() or (left := await self._busy_engines()):
            assert loop.time() < deadline, f"idle: {self.runtime.idle()}; left in engines: {left}"
            await asyncio.sleep(POLL_S)

    async def _busy_engines(self) -> dict[str, Status]:
        statuses = await self.runtime.status()
        return {
            name: status
            for name, status in statuses.items()
            if status.load.blocks_active or status.open_handoffs or status.requests
        }


@asynccontextmanager
async def serve(config: RuntimeConfig, **injected: Any) -> AsyncIterator[ServedRuntime]:
    """A runtime for the body, which must leave nothing behind.

    A task of its own keeps the runtime open: a fixture is set up and torn down in different tasks.
    """
    runtime = Runtime(config, **injected)
    up, leave = asyncio.Event(), asyncio.Event()
    host = asyncio.create_task(_keep_open(runtime, up, leave))
    await up.wait()
    if runtime.ready() is not None:
        await host  # raises why it did not start
    served = ServedRuntime(runtime)
    try:
        yield served
        await served.settle()
    finally:
        leave.set()
        await host


async def _keep_open(runtime: Runtime, up: asyncio.Event, leave: asyncio.Event) -> None:
    try:
        async with runtime:
            up.set()
            await leave.wait()
    finally:
        up.set()
