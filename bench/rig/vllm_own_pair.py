"""Two vLLM engines with a connector of vLLM's own, driven as its proxies drive them: prefill, then decode."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from dynrt.engines.config import EngineConfig
from rig.vllm_own_messages import Answered, Ask, Connector, OwnEngineSettings

START_S = 300.0
ANSWER_S = 120.0
STOP_S = 10.0
MAX_LINE_BYTES = 1 << 20
NUM_TOKENS = 3  # that decode makes, as in rig.engine_pair


class OwnRun(msgspec.Struct, frozen=True):
    """What one prompt's way brought; times are CLOCK_MONOTONIC seconds."""

    connector: Connector
    sampled_at: float  # prefill had the first token
    received_at: float  # decode's connector told that all KV had come
    decode_began_at: float  # decode's first step with a token began
    decoded_at: float  # and ended
    token_ids: list[int]

    @property
    def exposed_s(self) -> float:
        return self.received_at - self.sampled_at

    @property
    def decode_wait_s(self) -> float:
        return self.decode_began_at - self.received_at


class OwnPair:
    """`async with OwnPair(config, connector) as pair: run = await pair.run(prompt_ids)`"""

    def __init__(self, config: EngineConfig, connector: Connector) -> None:
        self._config = config
        self._connector = connector
        self._engines: dict[str, asyncio.subprocess.Process] = {}
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        for role in ("prefill", "decode"):
            self._engines[role] = await self._start(role)
        async with asyncio.timeout(START_S):
            for role in self._engines:
                await self._line(role)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._engines.values():
            assert engine.stdin is not None
            engine.stdin.close()
        ends = [asyncio.ensure_future(engine.wait()) for engine in self._engines.values()]
        await asyncio.wait(ends, timeout=STOP_S)
        for engine in self._engines.values():
            if engine.returncode is None:
                engine.kill()
        await asyncio.gather(*ends)

    async def run(self, prompt_ids: Sequence[int]) -> OwnRun:
        request_id = f"run-{next(self._numbers)}"  # of both: by it the connectors know what belongs together
        prefilled = await self._ask("prefill", Ask(request_id, list(prompt_ids), 1, _to_be_sent()))
        assert prefilled.kv_transfer_params is not None, "the connector says where decode finds the KV"
        decoded = await self._ask(
            "decode", Ask(request_id, list(prompt_ids), NUM_TOKENS, prefilled.kv_transfer_params)
        )
        assert decoded.received_at is not None, "decode was to receive, not to compute the prompt itself"
        return OwnRun(
            self._connector,
            prefilled.first_token_at,
            decoded.received_at,
            decoded.step_began_at,
            decoded.first_token_at,
            decoded.token_ids,
        )

    async def _start(self, role: str) -> asyncio.subprocess.Process:
        settings = OwnEngineSettings(
            connector=self._connector,
            role="kv_producer" if role == "prefill" else "kv_consumer",
            side_channel_port=_free_port(),
            threads=self._config.threads or 1,
            arguments=_arguments(self._config),
        )
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rig.vllm_own_engine",
            msgspec.json.encode(settings).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            limit=MAX_LINE_BYTES,
        )

    async def _ask(self, role: str, ask: Ask) -> Answered:
        stdin = self._engines[role].stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(ask) + b"\n")
        async with asyncio.timeout(ANSWER_S):
            return msgspec.json.decode(await self._line(role), type=Answered)

    async def _line(self, role: str) -> bytes:
        stdout = self._engines[role].stdout
        assert stdout is not None
        line = await stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM's own {role} engine has ended; it says why above")
        return line


def _to_be_sent() -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def _arguments(config: EngineConfig) -> dict[str, Any]:
    """As for dynrt's vLLM engine of the same configuration (engines/vllm/arguments.py)."""
    given = {name: msgspec.json.decode(text) for name, text in config.engine_args.items()}
    return {
        "model": config.model_dir,
        "dtype": config.dtype,
        "block_size": config.block_size,
        "max_num_batched_tokens": config.max_batch_tokens,
        "max_num_seqs": config.max_batch_requests,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **given,
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
