"""One replay: a trace's requests served by the real Runtime over simulated workers, in virtual time."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec

from dynrt.engines.config import SimConfig
from dynrt.engines.sim.profile import find_profile
from dynrt.engines.sim.skipping import LONGEST_STRETCH
from dynrt.planner.traces import VOCAB_SIZE, TraceRequest
from dynrt.runtime.config import RuntimeConfig
from dynrt.runtime.errors import ConfigError, DynrtError
from dynrt.runtime.memory_channel import MemoryChannel
from dynrt.runtime.messages import SamplingParams
from dynrt.runtime.offload import InlineOffload
from dynrt.runtime.replay.fleet import SimulatedFleet
from dynrt.runtime.replay.model_dir import write_model_dir
from dynrt.runtime.replay.policies import OURS, POLICIES
from dynrt.runtime.requests import GenerateRequest, LocalPrefill
from dynrt.runtime.runtime import Runtime
from dynrt.runtime.virtual_time import run_virtually

MESSAGE_S = 100e-6  # a control message's way
MAX_OPEN_REQUESTS = 8000  # the runtime keeps account of 8192 handoffs at most
SETTLE_S = 60.0  # for everything to come to rest, once all requests are answered
NO_HEARTBEATS_S = 1e8  # nothing hangs in a replay
HORIZON_S = 1e7  # 115 days: a replay that is not over by then never will be

OnFinished = Callable[[], None]


class ReplayConfig(msgspec.Struct, frozen=True):
    """What the trace is replayed against."""

    prefill: int = 4
    decode: int = 4
    profile: str = "llama-3.1-8b@h100"
    blocks: int | None = None  # per worker; None: as many as the profile's memory holds
    block_size: int = 512
    max_batch_tokens: int = 8192
    max_batch_requests: int = 256
    local_prefill: LocalPrefill = "auto"
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        if self.blocks is not None:
            return self.blocks
        return find_profile(self.profile).kv_capacity // self.block_size


class Served(msgspec.Struct, frozen=True):
    """How one request fared. Times in seconds since the trace began; `error` says why it was not served."""

    request: TraceRequest
    cached_tokens: int = 0
    first_at: float = 0.0
    finished_at: float = 0.0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.request.arrival_s

    @property
    def itl_s(self) -> float:
        """Mean time between two tokens; 0 for a single one."""
        num_gaps = self.request.output_tokens - 1
        return (self.finished_at - self.first_at) / num_gaps if num_gaps else 0.0


class WorkerUse(msgspec.Struct, frozen=True):
    """What one worker did."""

    name: str
    busy_s: float
    prefill_tokens_by_minute: dict[int, int]


class Replayed(msgspec.Struct, frozen=True):
    """The outcome of a replay, requests in the trace's order."""

    policy: str
    served: list[Served]
    prefill_workers: list[WorkerUse]  # decode workers where there are no others


def check_fits(requests: Sequence[TraceRequest], config: ReplayConfig) -> None:
    """Raises ConfigError if a request is longer than a worker's KV cache."""
    longest = max(requests, key=lambda request: request.prompt_tokens + request.output_tokens)
    num_tokens = longest.prompt_tokens + longest.output_tokens
    needed = -(-num_tokens // config.block_size)
    if needed > config.num_blocks:
        raise ConfigError(
            f"request {longest.number} of the trace has {num_tokens} tokens of prompt and output, {needed} blocks "
            f"of {config.block_size}; a worker has {config.num_blocks}: raise --blocks, or choose a --gpu with more "
            "memory"
        )


def replay(
    requests: Sequence[TraceRequest],
    config: ReplayConfig,
    policy: str = OURS,
    on_finished: OnFinished = lambda: None,
    longest_stretch: int = LONGEST_STRETCH,
) -> Replayed:
    """Serve all requests, which come in the order of their arrival. Raises ConfigError."""
    if not requests:
        raise ConfigError("the trace holds no request; at least one is needed")
    check_fits(requests, config)
    with _model_dir(requests) as model_dir:
        world = _World(config, policy, model_dir, longest_stretch)
        return run_virtually(world.serve(requests, on_finished), horizon_s=HORIZON_S)


@contextmanager
def _model_dir(requests: Sequence[TraceRequest]) -> Iterator[str]:
    """Of a model that takes every request of the trace."""
    context_length = max(request.prompt_tokens + request.output_tokens for request in requests)
    with tempfile.TemporaryDirectory(prefix="dynrt-replay-") as path:
        write_model_dir(Path(path), context_length, VOCAB_SIZE)
        yield path


class _World:
    """A runtime, its workers, and the clients that the trace stands for."""

    def __init__(self, config: ReplayConfig, policy: str, model_dir: str, longest_stretch: int) -> None:
        self._config = config
        self._policy = policy
        self._model_dir = model_dir
        channel = MemoryChannel("replay://control", lambda: MESSAGE_S)
        self._channel = channel
        self._fleet = SimulatedFleet(channel, config.block_size, longest_stretch)

    async def serve(self, requests: Sequence[TraceRequest], on_finished: OnFinished) -> Replayed:
        runtime = Runtime(
            self._runtime_config(),
            channel=self._channel,
            spawner=self._fleet,
            offload=InlineOffload(),
            randomness=Random(self._config.seed),
            make_planner=POLICIES[self._policy],
        )
        async with runtime:
            served = await self._serve_all(runtime, requests, on_finished)
            await self._settle(runtime)
        return Replayed(self._policy, served, self._uses())

    def _runtime_config(self) -> RuntimeConfig:
        config = self._config
        return RuntimeConfig(
            model=self._model_dir,
            prefill=config.prefill,
            decode=config.decode,
            engine="sim",
            sim=SimConfig(config.profile),
            local_prefill=config.local_prefill,
            kv_blocks=config.num_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_requests=config.max_batch_requests,
            max_open_requests=MAX_OPEN_REQUESTS,
            heartbeat_interval_s=NO_HEARTBEATS_S,
            heartbeat_limit_s=2 * NO_HEARTBEATS_S,
        )

    async def _serve_all(
        self, runtime: Runtime, requests: Sequence[TraceRequest], on_finished: OnFinished
    ) -> list[Served]:
        began_at = _now()
        tasks: list[asyncio.Task[Served]] = []
        async with asyncio.TaskGroup() as clients:
            for request in requests:
                await asyncio.sleep(began_at + request.arrival_s - _now())
                task = clients.create_task(_serve(runtime, request, began_at))
                task.add_done_callback(lambda _task: on_finished())
                tasks.append(task)
        return [task.result() for task in tasks]

    async def _settle(self, runtime: Runtime) -> None:
        """What is left open when all requests are answered would be a leak."""
        deadline = _now() + SETTLE_S
        while not runtime.idle() or any(worker.num_open for worker in self._fleet.workers):
            assert _now() < deadline, "something is left open"
            await asyncio.sleep(1.0)

    def _uses(self) -> list[WorkerUse]:
        workers = list(self._fleet.of_role("prefill" if self._config.prefill else "decode"))
        return [
            WorkerUse(worker.incarnation, worker.busy_s, worker.prefill_tokens_by_minute)
            for worker in workers
        ]


async def _serve(runtime: Runtime, request: TraceRequest, began_at: float) -> Served:
    sampling = SamplingParams(max_tokens=request.output_tokens, temperature=0.0)
    asked = GenerateRequest(request.prompt_ids(), sampling, request_id=str(request.number), seeded=True)
    first_at, cached_tokens = None, 0
    try:
        async for output in runtime.generate(asked):
            if first_at is None:
                first_at, cached_tokens = _now(), output.cached_tokens
    except DynrtError as error:
        return Served(request, error=error.message)
    assert first_at is not None, "an answer without a token"
    return Served(request, cached_tokens, first_at - began_at, _now() - began_at)


def _now() -> float:
    return asyncio.get_running_loop().time()
