"""A prefill and a decode engine process, driven message by message as the runtime would, one prompt at a time."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.runtime.fleet import introduction
from dynrt.runtime.messages import (
    FromEngine,
    Register,
    SamplingParams,
    Shutdown,
    StepReport,
    Submit,
    TokenDelta,
    Welcome,
    pack_ids,
)
from dynrt.runtime.spawner import Process, ProcessSpawner
from dynrt.runtime.zmq_channel import ZmqChannel
from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    Committed,
    FirstToken,
    PeerConnected,
    Quiesced,
    Reserved,
    Sent,
)
from dynrt.transfer.trace import TraceEvent, read_trace

Mode = Literal["layerwise", "whole", "off"]
DEADLINE_S = 120.0
STOP_GRACE_S = 5.0
SAMPLING = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class Run(msgspec.Struct, frozen=True):
    """What one prompt's prefill (and handoff) brought; times are CLOCK_MONOTONIC seconds."""

    key: str
    mode: Mode
    submitted_at: float
    sampled_at: float  # prefill had the first token
    received_at: float | None  # decode had counted the last unit
    decoded_at: float | None  # decode had its own first token
    token_ids: list[int]
    kv_bytes: int
    post_s: float
    link_s: float
    prefill_cpu_s: float  # of the prefill engine's process, all threads, to the first token

    @property
    def exposed_s(self) -> float:
        assert self.received_at is not None, "nothing was handed off"
        return max(0.0, self.received_at - self.sampled_at)

    @property
    def first_decode_s(self) -> float:
        """From the prompt to decode's first own token."""
        assert self.decoded_at is not None, "nothing was handed off"
        return self.decoded_at - self.submitted_at


class EnginePair:
    """`async with EnginePair(...) as pair: run = await pair.run(prompt_ids, "layerwise")`

    "layerwise": decode's blocks are told to prefill as soon as they are reserved. "whole": only when prefill is
    done, so that everything is sent then. "off": nothing is handed off.
    """

    def __init__(self, config: EngineConfig, directory: Path, decode: EngineConfig | None = None) -> None:
        """`decode`: of the decode engine, if it is to be set up otherwise."""
        self._configs = {"prefill": config, "decode": decode or config}
        self._traces = {role: directory / f"{role}.trace" for role in ("prefill", "decode")}
        self._channel = ZmqChannel()
        self._tokens = {secrets.token_hex(8): role for role in self._traces}
        self._processes: list[Process] = []
        self._registers: dict[str, Register] = {}
        self._heard: dict[type, asyncio.Queue[Any]] = {}
        self._deltas: asyncio.Queue[tuple[str, TokenDelta, float]] = asyncio.Queue(1000)
        self._random = random.Random(0)

    async def __aenter__(self) -> Self:
        self._channel.open(self._on_message)
        for token, role in self._tokens.items():
            config = self._configs[role]
            transfer = msgspec.structs.replace(config.transfer, trace=str(self._traces[role]))
            config = msgspec.structs.replace(config, role=role, transfer=transfer)
            self._processes.append(ProcessSpawner().spawn(config, self._channel.address, token))
        async with asyncio.timeout(DEADLINE_S):
            await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for role in self._registers:
            self._send(role, Shutdown())
        ends = [asyncio.ensure_future(process.exited()) for process in self._processes]
        await asyncio.wait(ends, timeout=STOP_GRACE_S)
        for process in self._processes:
            process.kill()
        await asyncio.gather(*ends)
        self._channel.close()

    @property
    def layer_block_bytes(self) -> int:
        return self._registers["prefill"].geometry[0].layer_block_bytes

    async def run(self, prompt_ids: Sequence[int], mode: Mode) -> Run:
        """Prefill on one engine and, unless `mode` is "off", two more tokens on the other."""
        key = self._random.randbytes(16)
        self._deltas = asyncio.Queue(1000)
        async with asyncio.timeout(DEADLINE_S):
            return await self._run(key, pack_ids(prompt_ids), mode)

    async def continuation(self, prompt_ids: Sequence[int], first_token: int) -> list[int]:
        """What the prefill engine itself, from the KV it computed, decodes behind that first token."""
        self._deltas = asyncio.Queue(1000)
        submit = Submit(
            self._random.randbytes(16),
            0,
            "generate",
            pack_ids(prompt_ids),
            SAMPLING,
            output_ids=pack_ids([first_token]),
        )
        self._send("prefill", submit)
        token_ids: list[int] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(token_ids) < SAMPLING.max_tokens - 1:
                _, delta, _ = await self._deltas.get()
                token_ids += delta.token_ids
        return token_ids

    def trace(self, role: str) -> list[TraceEvent]:
        """Everything that engine's transfer thread has noted; complete once the pair has ended."""
        return read_trace(self._traces[role])

    async def _run(self, key: bytes, prompt_ids: bytes, mode: Mode) -> Run:
        submitted_at, cpu_before = time.monotonic(), self._prefill_cpu_s()
        self._send("prefill", Submit(key, 0, "prefill", prompt_ids, SAMPLING))
        reserved = None
        if mode != "off":
            peer = self._registers["prefill"].incarnation
            self._send("decode", Submit(key, 0, "reserve", prompt_ids, SAMPLING, peer=peer))
            reserved = await self._next(Reserved)
        if reserved is not None and mode == "layerwise":
            self._arm(reserved)
        _, delta, sampled_at = await self._deltas.get()
        cpu_s = self._prefill_cpu_s() - cpu_before
        if reserved is None:
            return await self._called_off(key, delta, submitted_at, sampled_at, cpu_s)
        if mode == "whole":
            self._arm(reserved)
        self._send("decode", FirstToken(key, 0, delta.token_ids[0], len(delta.text)))
        return await self._handed_off(key, mode, delta, submitted_at, sampled_at, cpu_s)

    def _prefill_cpu_s(self) -> float:
        pid = self._registers["prefill"].pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime

    async def _called_off(
        self, key: bytes, delta: TokenDelta, submitted_at: float, sampled_at: float, cpu_s: float
    ) -> Run:
        self._send("prefill", CancelHandoff(key, 0, "a run without a handoff"))
        await self._next(Quiesced)
        return Run(
            key.hex(), "off", submitted_at, sampled_at, None, None, delta.token_ids, 0, 0.0, 0.0, cpu_s
        )

    async def _handed_off(
        self, key: bytes, mode: Mode, delta: TokenDelta, submitted_at: float, sampled_at: float, cpu_s: float
    ) -> Run:
        committed, sent = await self._next(Committed), await self._next(Sent)
        _, second, decoded_at = await self._deltas.get()
        _, third, _ = await self._deltas.get()
        token_ids = [*delta.token_ids, *second.token_ids, *third.token_ids]
        return Run(
            key.hex(),
            mode,
            submitted_at,
            sampled_at,
            committed.received_at,
            decoded_at,
            token_ids,
            sent.kv_bytes,
            sent.post_s,
            sent.link_s,
            cpu_s,
        )

    # --- the runtime's part -----------------------------------------------------------------------

    async def _connect(self) -> None:
        while len(self._registers) < len(self._tokens):
            await self._next(Register)
        prefill, decode = self._registers["prefill"], self._registers["decode"]
        self._send("decode", introduction(prefill, will_push=False))
        self._send("prefill", introduction(decode, will_push=True))
        connected = await self._next(PeerConnected)
        assert connected.error is None, connected.error

    def _on_message(self, incarnation: str, message: FromEngine) -> None:
        if isinstance(message, Register):
            self._registers[self._tokens[message.spawn_token]] = message
            self._channel.send(incarnation, Welcome("bench", incarnation, 1.0))
        if isinstance(message, StepReport):
            for delta in message.deltas:
                assert message.timing is not None, "tokens come out of steps"
                self._deltas.put_nowait((incarnation, delta, message.timing.ended_at))
        else:
            self._queue(type(message)).put_nowait(message)

    def _queue(self, kind: type) -> asyncio.Queue[Any]:
        return self._heard.setdefault(kind, asyncio.Queue(10_000))

    async def _next(self, kind: type) -> Any:
        return await self._queue(kind).get()

    def _arm(self, reserved: Reserved) -> None:
        decode = self._registers["decode"].incarnation
        arm = Arm(
            reserved.key,
            reserved.epoch,
            decode,
            reserved.first_block,
            reserved.block_ids,
            reserved.num_tokens,
        )
        self._send("prefill", arm)

    def _send(self, role: str, message: Any) -> None:
        self._channel.send(self._registers[role].incarnation, message)
