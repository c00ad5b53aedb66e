"""A whole simulated world: the real Runtime on virtual time over scripted engines, and what must hold at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from sim_engine import Harm, SimEngine, next_token, text_so_far
from sim_transfer import CONNECT_S, SimFabric

from dynrt.engines.config import EngineConfig
from dynrt.runtime.config import RuntimeConfig
from dynrt.runtime.memory_channel import MemoryChannel
from dynrt.runtime.messages import FinishReason, Role, SamplingParams, pack_ids
from dynrt.runtime.offload import InlineOffload
from dynrt.runtime.requests import GenerateRequest, LocalPrefill
from dynrt.runtime.runtime import Runtime

SETTLE_S = 30.0  # for everything to come to rest
CHECK_S = 1e-3
MESSAGE_S = (50e-6, 2e-3)  # a control message's way


@dataclass
class Fault:
    """The `nth` time (from 1) that an engine of `role` comes to `point`, it is harmed."""

    role: str
    point: str
    harm: Harm
    nth: int = 1
    has_struck: bool = False


@dataclass
class Answer:
    """What a client got."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0

    def check(self, max_tokens: int) -> None:
        """Exactly what one undisturbed engine would have said."""
        expected: list[int] = []
        while len(expected) < max_tokens:
            expected.append(next_token(self.prompt_ids + expected))
        assert self.token_ids == expected
        assert self.text == text_so_far(expected, is_over=True)
        assert self.finish_reason == "length"
        assert self.cached_tokens == 0, "the simulated engines compute every prompt"


class SimWorld:
    """Is the Spawner of its runtime. One seed, one course of events."""

    def __init__(
        self, model_dir: Path, seed: int = 0, faults: Sequence[Fault] = (), outbox_limit: int = 10_000
    ) -> None:
        self.random = Random(seed)
        self.channel = MemoryChannel("sim://control", lambda: self.random.uniform(*MESSAGE_S), outbox_limit)
        self.fabric = SimFabric(self.random)
        self.engines: list[SimEngine] = []  # all that ever were
        self.spawned_at: list[float] = []
        self.on_spawn: Callable[[SimEngine], None] = lambda engine: None
        self.points: dict[tuple[str, str], int] = {}
        self.samplers: frozenset[str] = frozenset()  # roles whose engines sample the first token themselves
        self._model_dir = model_dir
        self._faults = list(faults)

    # --- the spawner ------------------------------------------------------------------------------

    def spawn(self, config: EngineConfig, address: str, spawn_token: str) -> SimEngine:
        assert address == self.channel.address
        engine = self._start(config, spawn_token)
        self.spawned_at.append(asyncio.get_running_loop().time())
        self.on_spawn(engine)
        return engine

    def adopt(self, pid: int) -> SimEngine:
        engine = next(engine for engine in self.engines if engine.pid == pid)
        if not engine.is_alive:
            raise ProcessLookupError(pid)
        return engine

    def join(self, role: Role) -> SimEngine:
        """Start an engine that no runtime started."""
        return self._start(
            EngineConfig(str(self._model_dir), self._model_dir.name, role=role), spawn_token=""
        )

    def _start(self, config: EngineConfig, spawn_token: str) -> SimEngine:
        number = len(self.engines)
        load_s = self.random.uniform(0.1, 0.5)
        engine = SimEngine(
            1000 + number,
            config,
            spawn_token,
            f"inc-{number}",
            self.channel,
            self.fabric,
            self._trace,
            load_s,
            takes_first_token=config.role not in self.samplers,
        )
        self.engines.append(engine)
        return engine

    # --- the runtime ------------------------------------------------------------------------------

    @asynccontextmanager
    async def runtime(self, **config: object) -> AsyncIterator[Runtime]:
        """Up, and at the end checked: nothing is open or held anywhere, and no memory was touched wrongly."""
        async with self.unsettled_runtime(**config) as runtime:
            yield runtime
            await self.settle(runtime)
        assert [violation for engine in self.engines for violation in engine.memory.violations] == []
        assert not any(engine.is_alive for engine in self.engines if engine.is_spawned)

    def unsettled_runtime(self, **config: object) -> Runtime:
        """To be entered; what is under way at its end is cut off."""
        settings = RuntimeConfig(model=str(self._model_dir), start_timeout_s=60.0, **config)  # type: ignore[arg-type]
        return Runtime(
            settings, channel=self.channel, spawner=self, offload=InlineOffload(), randomness=self.random
        )

    async def complete(self, runtime: Runtime, num_workers: int) -> None:
        """So many workers are up, and all pairs of them are connected."""
        await until(
            lambda: (
                len(runtime.pids()) == num_workers
                and set(runtime.pids().values()) == {engine.pid for engine in self.living()}
            ),
            f"{num_workers} workers are up",
        )
        await asyncio.sleep(CONNECT_S[1] + CHECK_S)

    async def settle(self, runtime: Runtime) -> None:
        """Everything comes to rest."""
        await until(
            lambda: runtime.idle() and all(engine.is_idle for engine in self.living()),
            "nothing is open any more",
        )

    def living(self, role: str | None = None) -> list[SimEngine]:
        return [engine for engine in self.engines if engine.is_alive and role in (None, engine.role)]

    def _trace(self, engine: SimEngine, point: str) -> None:
        count = self.points[engine.role, point] = self.points.get((engine.role, point), 0) + 1
        for fault in self._faults:
            is_due = (fault.role, fault.point, fault.nth) == (engine.role, point, count)
            if is_due and not fault.has_struck:
                fault.has_struck = True
                engine.harm(fault.harm)

    # --- clients ----------------------------------------------------------------------------------

    def prompt(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(16, 512) for _ in range(num_tokens)]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Fails after SETTLE_S."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    while not condition():
        assert loop.time() < deadline, f"not within {SETTLE_S:g} s: {what}"
        await asyncio.sleep(CHECK_S)


def request_for(
    prompt_ids: list[int],
    max_tokens: int,
    local_prefill: LocalPrefill | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens, temperature=0.0, stop_token_ids=stop_token_ids)
    return GenerateRequest(pack_ids(prompt_ids), sampling, local_prefill=local_prefill)


async def ask(runtime: Runtime, request: GenerateRequest, prompt_ids: list[int]) -> Answer:
    answer = Answer(prompt_ids)
    async for output in runtime.generate(request):
        answer.token_ids += output.token_ids
        answer.text += output.text
        answer.finish_reason = output.finish_reason
        answer.cached_tokens = output.cached_tokens
    return answer


async def served(
    runtime: Runtime,
    world: SimWorld,
    num_tokens: int,
    max_tokens: int,
    local_prefill: LocalPrefill | None = None,
) -> None:
    """A client that gets the right answer."""
    prompt_ids = world.prompt(num_tokens)
    answer = await ask(runtime, request_for(prompt_ids, max_tokens, local_prefill), prompt_ids)
    answer.check(max_tokens)
