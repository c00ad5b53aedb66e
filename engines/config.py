"""How one engine process is set up; passed to it on its command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.messages import KvConnector, Role
from dynrt.transfer.options import TransferOptions

POOLS = ("prefill", "decode")


class SimConfig(msgspec.Struct, frozen=True):
    """What a `sim` engine pretends to be. Raises ConfigError for a speedup that is no speed."""

    profile: str = "llama-3.1-8b@h100"  # MODEL@GPU, "dynamo-mocker", or a JSON file: engines.sim.profile
    speedup: float = 1.0  # modelled seconds that pass in one second

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speedup) and self.speedup > 0):
            raise ConfigError(f"--speedup is {self.speedup:g}; it must be a number above 0")


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
    engine_args: dict[str, str] = {}  # for vLLM's EngineArgs, where kind is "vllm"
    sim: SimConfig = SimConfig()  # read where kind is "sim"
    transfer: TransferOptions = TransferOptions()
    kv_connector: KvConnector = "layerwise"


def transfer_options_of(verify: bool, backends: Sequence[str], ucx: Sequence[str]) -> TransferOptions:
    """What was given as --verify-kv, --nixl-backend NAME and --ucx NAME=VALUE. Raises ConfigError."""
    defaults = TransferOptions()
    settings = dict(_pair("--ucx", pair, "UCX_TLS=tcp,cuda_copy") for pair in ucx)
    for name in settings:
        if not name.startswith("UCX_"):
            raise ConfigError(f"--ucx {name} is no setting of UCX; their names begin with UCX_")
    return TransferOptions(verify=verify, backends=tuple(backends) or defaults.backends, ucx=settings)


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise ConfigError(f"{option} is {text!r}; write NAME=VALUE, such as {example}")
    return name, value


def check_kv_connector(connector: KvConnector, kind: str, transfer: TransferOptions) -> None:
    """Raises ConfigError for an engine that has no connector of its own, or for checks that only ours can make."""
    if connector == "layerwise":
        return
    if kind != "vllm":
        raise ConfigError(
            f"--kv-connector {connector} is vLLM's own, for --engine vllm; --engine is {kind!r}, which has 'layerwise'"
        )
    if transfer.verify:
        raise ConfigError(
            f"--verify-kv checks what the layer-wise push brings; --kv-connector {connector} moves KV without it"
        )


def engine_args_of(kind: str, pairs: Sequence[str]) -> dict[str, str]:
    """What was given as --engine-arg [prefill:|decode:]KEY=VALUE.

    Raises ConfigError for what is no pair, or is for no vLLM, or for no pool.
    """
    if pairs and kind != "vllm":
        raise ConfigError(f"--engine-arg {pairs[0]} is for --engine vllm; --engine is {kind!r}")
    arguments = dict(_pair("--engine-arg", pair, "max_model_len=4096") for pair in pairs)
    for name in arguments:
        pool, separator, _ = name.partition(":")
        if separator and pool not in POOLS:
            raise ConfigError(f"--engine-arg {name}: a pool is {' or '.join(POOLS)}, as in decode:KEY=VALUE")
    return arguments


def engine_args_for(role: Role, arguments: Mapping[str, str]) -> dict[str, str]:
    """Of those for all pools and for each, what an engine of this role gets; what is for its pool wins."""
    for_all = {name: value for name, value in arguments.items() if ":" not in name}
    own = f"{role}:"
    return for_all | {
        name.removeprefix(own): value for name, value in arguments.items() if name.startswith(own)
    }
