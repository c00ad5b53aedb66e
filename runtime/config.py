"""What a runtime is told at its start."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynrt.engines.config import SimConfig, check_kv_connector
from dynrt.planner.prefix_index import DEFAULT_LIMIT_BYTES
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.messages import KvConnector
from dynrt.runtime.requests import LocalPrefill
from dynrt.transfer.options import TransferOptions

EngineKind = Literal["native", "sim", "vllm"]
Dtype = Literal["auto", "float32", "bfloat16"]

MAX_WORKERS_PER_POOL = 64
LEAST_INDEX_BYTES = 1_000_000
LEAST = {
    "threads": 1,
    "kv_blocks": 2,
    "max_batch_tokens": 1,
    "max_batch_requests": 1,
    "max_waiting_requests": 1,
}


class RuntimeConfig(msgspec.Struct, frozen=True):
    """One model, a pool of prefill workers and a pool of decode workers. None means: choose for this machine."""

    model: str | None = None  # alias, Hugging Face directory, GGUF file or hub id; None: smollm2-135m
    prefill: int = 1
    decode: int = 1
    engine: EngineKind = "native"
    sim: SimConfig = SimConfig()  # read where engine is "sim"
    dtype: Dtype = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None  # per engine process
    local_prefill: LocalPrefill = "auto"
    kv_blocks: int | None = None  # per engine
    max_batch_tokens: int = 512
    max_batch_requests: int = 64
    engine_args: dict[str, str] = {}  # for vLLM's EngineArgs; prefill: or decode: before a name is its pool
    max_open_requests: int = 4096
    max_waiting_requests: int = 1024  # for their first token, on one worker
    max_ttft_s: float | None = None  # requests whose first token is expected later are refused; None: none is
    index_memory_bytes: int = DEFAULT_LIMIT_BYTES  # of the prefix index
    transfer: TransferOptions = TransferOptions()
    kv_connector: KvConnector = "layerwise"
    otel_endpoint: str | None = None  # URL of an OTLP receiver that gets traces; None: nobody does
    control: str | None = None  # address of the control socket; None: ipc in a private directory
    start_timeout_s: float = 600.0
    heartbeat_interval_s: float = 0.5
    heartbeat_limit_s: float = 10.0
    step_limit_s: float = 300.0  # a step that computes for longer than this is a hang
    max_attempts: int = 3  # times that one request may be (re)started
    no_worker_wait_s: float = 4.0  # how long a request waits for a worker to come back


def check_config(config: RuntimeConfig) -> None:
    """Refuse what cannot work, before anything is started."""
    for name in ("prefill", "decode"):
        count = getattr(config, name)
        if not 0 <= count <= MAX_WORKERS_PER_POOL:
            raise ConfigError(f"--{name} is {count}; it can be 0 to {MAX_WORKERS_PER_POOL}")
    if config.prefill + config.decode == 0 and config.control is None:
        raise ConfigError(
            "--prefill 0 --decode 0 leaves no engine; use at least --decode 1, or --control for engines that join"
        )
    if config.prefill and not config.decode and config.control is None:
        raise ConfigError(
            f"--prefill {config.prefill} --decode 0 leaves nobody to decode; use --decode 1 or more"
        )
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; at least {least}")
    check_kv_connector(config.kv_connector, config.engine, config.transfer)
    if config.max_ttft_s is not None and not config.max_ttft_s > 0:
        raise ConfigError(f"--max-ttft is {config.max_ttft_s:g}; it must be more than 0 seconds")
    if config.index_memory_bytes < LEAST_INDEX_BYTES:
        raise ConfigError(
            f"--index-memory is {config.index_memory_bytes / 1e6:g} MB; at least {LEAST_INDEX_BYTES / 1e6:g}"
        )
