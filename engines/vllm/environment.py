"""Environment variables that vLLM and OpenMP read when they are imported."""

from __future__ import annotations

from dynrt.engines.config import EngineConfig


def vllm_environment(config: EngineConfig) -> dict[str, str]:
    """What an engine process sets before it imports vLLM."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, worker and connector in the compute thread
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a host binds itself to the same core
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # whole hashes: 64 bits of them may collide
        "VLLM_CONFIGURE_LOGGING": "0",  # its records go to our handler
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a directory
    }
    if config.threads is not None:
        variables["OMP_NUM_THREADS"] = str(config.threads)
    return variables
