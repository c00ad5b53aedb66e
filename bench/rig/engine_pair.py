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
from typing import Any, Literal, NamedTuple, Self

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
START_S = 300.0  # importing vLLM takes 10 s of CPU, on a machine that may be busy
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
    ready_at: float | None  # and had the first token as well, where it takes one
    decode_began_at: float | None  # the step of decode's first own token began
    decoded_at: float | None  # and ended
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
    def decode_wait_s(self) -> float:
        """How long what decode waits for was there before its first step began."""
        assert self.ready_at is not None and self.decode_began_at is not None, "nothing was handed off"
        return max(0.0, self.decode_began_at - self.ready_at)

    @property
    def first_decode_s(self) -> float:
        """From the prompt to decode's first own token."""
        assert self.decoded_at is not None, "nothing was handed off"
        return self.decoded_at - self.submitted_at


class _Delta(NamedTuple):
    """What one request got from one step, and when that began and ended."""

    told: TokenDelta
    began_at: float
    ended_at: float


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
        self._deltas: asyncio.Queue[_Delta] = asyncio.Queue(1000)
        self._random = random.Random(0)
        self._arms_at_once = False

    async def __aenter__(self) -> Self:
        self._channel.open(self._on_message)
        for token, role in self._tokens.items():
            config = self._configs[role]
            transfer = msgspec.structs.replace(config.transfer, trace=str(self._traces[role]))
            config = msgspec.structs.replace(config, role=role, transfer=transfer)
            self._processes.append(ProcessSpawner().spawn(config, self._channel.address, token))
        async with asyncio.timeout(START_S):
            await self._connected()
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
                token_ids += (await self._deltas.get()).told.token_ids
        return token_ids

    def trace(self, role: str) -> list[TraceEvent]:
        """Everything that engine's transfer thread has noted; complete once the pair has ended."""
        return read_trace(self._traces[role])

    async def _run(self, key: bytes, prompt_ids: bytes, mode: Mode) -> Run:
        self._arms_at_once = mode == "layerwise"
        cpu_before = self._prefill_cpu_s()
        submitted_at = time.monotonic()
        if mode != "off":
            self._reserve(key, prompt_ids)
        self._send("prefill", Submit(key, 0, "prefill", prompt_ids, SAMPLING))
        first = await self._deltas.get()
        cpu_s = self._prefill_cpu_s() - cpu_before
        if mode == "off":
            return await self._called_off(key, first, submitted_at, cpu_s)
        if mode == "whole":
            self._arm(await self._next(Reserved))
        if self._decode_takes_first_token:
            self._send("decode", FirstToken(key, 0, first.told.token_ids[0], len(first.told.text)))
        return await self._handed_off(key, mode, first, submitted_at, cpu_s)

    def _reserve(self, key: bytes, prompt_ids: bytes) -> None:
        """With a lease as long as the deadline: nobody renews it here."""
        peer = self._registers["prefill"].incarnation
        self._send("decode", Submit(key, 0, "reserve", prompt_ids, SAMPLING, lease_s=DEADLINE_S, peer=peer))

    @property
    def _decode_takes_first_token(self) -> bool:
        return self._registers["decode"].first_token_from == "prefill"

    def _prefill_cpu_s(self) -> float:
        pid = self._registers["prefill"].pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime

    async def _called_off(self, key: bytes, first: _Delta, submitted_at: float, cpu_s: float) -> Run:
        self._send("prefill", CancelHandoff(key, 0, "a run without a handoff"))
        await self._next(Quiesced)
        return Run(
            key=key.hex(),
            mode="off",
            submitted_at=submitted_at,
            sampled_at=first.ended_at,
            received_at=None,
            ready_at=None,
            decode_began_at=None,
            decoded_at=None,
            token_ids=first.told.token_ids,
            kv_bytes=0,
            post_s=0.0,
            link_s=0.0,
            prefill_cpu_s=cpu_s,
        )

    async def _handed_off(
        self, key: bytes, mode: Mode, first: _Delta, submitted_at: float, cpu_s: float
    ) -> Run:
        committed, sent = await self._next(Committed), await self._next(Sent)
        takes_first = self._decode_takes_first_token
        token_ids = list(first.told.token_ids) if takes_first else []
        first_own = await self._deltas.get()
        token_ids += first_own.told.token_ids
        while len(token_ids) < SAMPLING.max_tokens:
            token_ids += (await self._deltas.get()).told.token_ids
        return Run(
            key=key.hex(),
            mode=mode,
            submitted_at=submitted_at,
            sampled_at=first.ended_at,
            received_at=committed.received_at,
            ready_at=max(committed.received_at, first.ended_at) if takes_first else committed.received_at,
            decode_began_at=first_own.began_at,
            decoded_at=first_own.ended_at,
            token_ids=token_ids,
            kv_bytes=sent.kv_bytes,
            post_s=sent.post_s,
            link_s=sent.link_s,
            prefill_cpu_s=cpu_s,
        )

    # --- the runtime's part -----------------------------------------------------------------------

    async def _connected(self) -> None:
        """Raises RuntimeError if an engine ends before."""
        connecting = asyncio.ensure_future(self._connect())
        ends = [asyncio.ensure_future(process.exited()) for process in self._processes]
        await asyncio.wait([connecting, *ends], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not connecting.done():
            connecting.cancel()
            raise RuntimeError("an engine has ended before it was ready; it says why above")
        await connecting

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
                ended_at = message.timing.ended_at
                self._deltas.put_nowait(_Delta(delta, ended_at - message.timing.duration_s, ended_at))
        elif isinstance(message, Reserved) and self._arms_at_once:
            self._arm(message)
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
