"""`dynrt engine`: what one engine process does from its command line to its end."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys

import msgspec

from dynrt.engines.config import (
    EngineConfig,
    SimConfig,
    check_kv_connector,
    engine_args_for,
    engine_args_of,
    transfer_options_of,
)
from dynrt.engines.models.resolve import prepare
from dynrt.engines.vllm.environment import prepare_process
from dynrt.runtime.logs import set_up_logs
from dynrt.transfer.ucx import ucx_environment

log = logging.getLogger("dynrt.engine")


def run_engine(arguments: argparse.Namespace) -> int:
    """Until the runtime or a signal ends it. Raises DynrtError for what cannot be loaded or joined."""
    set_up_logs(arguments.log_format)
    config = _config(arguments)
    # UCX reads these when NIXL is imported, which the transfer thread does.
    one_host = not arguments.join.startswith("tcp://")
    os.environ.update(ucx_environment(one_host=one_host) | config.transfer.ucx)
    if config.kind == "vllm":
        prepare_process(config)
    from dynrt.engines.process import EngineProcess

    EngineProcess(config, arguments.join, arguments.spawn_token).run()
    if config.kind != "vllm":  # Triton's bindings print every object of theirs that is not collected
        gc.freeze()  # else Python's last collection walks through all of torch: more than a second for nothing
    return 0


def _config(arguments: argparse.Namespace) -> EngineConfig:
    if arguments.settings is not None:
        return msgspec.json.decode(arguments.settings, type=EngineConfig)
    model = prepare(arguments.model, lambda line: print(line, file=sys.stderr, flush=True))
    transfer = transfer_options_of(arguments.verify_kv, arguments.nixl_backend, arguments.ucx)
    check_kv_connector(arguments.kv_connector, arguments.engine, transfer)
    return EngineConfig(
        model_dir=model.path,
        model_name=model.name,
        kind=arguments.engine,
        role=arguments.role,
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads,
        kv_blocks=arguments.kv_blocks,
        max_batch_tokens=arguments.max_batch_tokens,
        max_batch_requests=arguments.max_batch_requests,
        engine_args=engine_args_for(arguments.role, engine_args_of(arguments.engine, arguments.engine_arg)),
        sim=SimConfig(arguments.sim_profile, arguments.speedup),
        transfer=transfer,
        kv_connector=arguments.kv_connector,
    )
