"""What vLLM and OpenMP read when they are imported: environment variables, and where vLLM's log goes."""

from __future__ import annotations

import logging
import os
import socket
from importlib.metadata import version

from dynrt.engines.config import EngineConfig


def prepare_process(config: EngineConfig) -> None:
    """Before anything imports vLLM or torch."""
    os.environ.update(_variables(config))
    if config.kv_connector == "nixl-pull":
        for name, value in _side_channel().items():
            os.environ.setdefault(name, value)  # for engines of several hosts, users set them
    join_logs()


def join_logs() -> None:
    """What vLLM logs goes where our own log does."""
    vllm_log, our_log = logging.getLogger("vllm"), logging.getLogger("dynrt")
    vllm_log.handlers[:] = our_log.handlers
    vllm_log.propagate = False
    vllm_log.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))


def _variables(config: EngineConfig) -> dict[str, str]:
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, worker and connector in the compute thread
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a host binds itself to the same core
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # rank processes: threads do not survive a fork
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # whole hashes: 64 bits of them may collide
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a directory
    }
    on_cpu = version("torch").endswith("+cpu")
    threads = openmp_threads(config) if on_cpu else config.threads
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if on_cpu and "enforce_eager" not in config.engine_args:
        # Eager means the model. Log probabilities would still be compiled, 15 s long, in the first step with some.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def _side_channel() -> dict[str, str]:
    """Where decode asks for what NIXL must know of prefill: a free port, on this host alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_RCACHE_MAX_UNRELEASED": "1024",  # vLLM sets it too, but not once NIXL is imported
    }


def openmp_threads(config: EngineConfig) -> int | None:
    """Of each process that computes; None: all cores, as OpenMP would choose, which is too many for several ranks."""
    arguments = {name.replace("-", "_"): text for name, text in config.engine_args.items()}
    num_ranks = arguments.get("tensor_parallel_size", "1")
    if config.threads is not None or not num_ranks.isdecimal() or int(num_ranks) < 2:
        return config.threads
    return max(1, len(os.sched_getaffinity(0)) // int(num_ranks))
