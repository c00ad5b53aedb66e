"""How one engine process is set up; passed to it on its command line."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynrt.runtime.messages import Role


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything an engine needs to know before it registers. None means: choose for this machine."""

    model_dir: str
    model_name: str
    kind: str = "native"
    role: Role = "both"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    kv_blocks: int | None = None  # size of the KV cache
    block_size: int = 32
    max_batch_tokens: int = 512  # tokens computed in one step, and so the longest chunk of a prompt
    max_batch_requests: int = 64
    transfer_trace: str | None = None  # file to which the transfer thread writes its trace
