"""The engines that a configuration asks for."""

from __future__ import annotations

import os
import secrets

from dynrt.engines.config import EngineConfig, engine_args_for
from dynrt.engines.models.resolve import ModelDir
from dynrt.runtime.config import RuntimeConfig
from dynrt.runtime.messages import Role
from dynrt.runtime.supervisor import EngineSlot


def engine_slots(config: RuntimeConfig, model: ModelDir) -> list[EngineSlot]:
    """A slot for each worker of both pools."""
    num_engines = config.prefill + config.decode
    roles: list[tuple[Role, int]] = [("prefill", config.prefill), ("decode", config.decode)]
    threads = config.threads or max(1, (os.cpu_count() or 1) // max(1, num_engines))
    return [
        EngineSlot(f"{role}-{number}", _engine_config(config, model, role, threads), secrets.token_hex(16))
        for role, count in roles
        for number in range(count)
    ]


def _engine_config(config: RuntimeConfig, model: ModelDir, role: Role, threads: int) -> EngineConfig:
    return EngineConfig(
        model_dir=model.path,
        model_name=model.name,
        kind=config.engine,
        role=role,
        dtype=config.dtype,
        device=config.device,
        threads=threads,
        kv_blocks=config.kv_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_requests=config.max_batch_requests,
        engine_args=engine_args_for(role, config.engine_args),
        sim=config.sim,
        transfer=config.transfer,
        kv_connector=config.kv_connector,
    )
