"""What is simulated: a model on a GPU, as far as time and memory show it from outside."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynrt.engines.sim.link import Link
from dynrt.engines.sim.timing import DynamoMocker, Roofline, Timing
from dynrt.runtime.errors import ConfigError

BYTES_PER_VALUE = 2  # weights and KV in bfloat16
FLOPS_SHARE = 0.5  # of the peak that prefill reaches: 40 to 60 % is what good engines report
BANDWIDTH_SHARE = 0.8  # of the peak that decode reaches; as NVIDIA's AIConfigurator assumes
MEMORY_SHARE = 0.9  # of the GPU's memory that weights and KV cache may fill; vLLM's default
NIC = Link(bytes_per_s=45e9, send_s=10e-6)  # 400 Gbit/s at 90 %; latency from AIConfigurator's h200_sxm


class Profile(msgspec.Struct, frozen=True):
    """Also what a JSON file given as `--sim-profile` holds."""

    timing: Timing
    num_layers: int
    kv_bytes_per_token: int  # of all layers
    kv_capacity: int  # tokens that the KV cache holds
    link: Link = NIC

    def kv_bytes(self, num_tokens: int) -> float:
        """What the KV of `num_tokens` takes in one layer."""
        return num_tokens * self.kv_bytes_per_token / self.num_layers


class _Gpu(msgspec.Struct, frozen=True):
    flops: float  # bfloat16, dense, from NVIDIA's data sheets
    bytes_per_s: float
    memory_bytes: float


class _Model(msgspec.Struct, frozen=True):
    parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int = 128


GPUS = {
    "a100": _Gpu(flops=312e12, bytes_per_s=2.039e12, memory_bytes=80e9),
    "h100": _Gpu(flops=989e12, bytes_per_s=3.35e12, memory_bytes=80e9),
    "h200": _Gpu(flops=989e12, bytes_per_s=4.8e12, memory_bytes=141e9),
}
MODELS = {  # from their config.json
    "llama-3.1-8b": _Model(8.03e9, num_layers=32, num_heads=32, num_kv_heads=8),
    "qwen2.5-7b": _Model(7.62e9, num_layers=28, num_heads=28, num_kv_heads=4),
    "qwen3-8b": _Model(8.19e9, num_layers=36, num_heads=32, num_kv_heads=8),
    "qwen3-32b": _Model(32.8e9, num_layers=64, num_heads=64, num_kv_heads=8),
}
DYNAMO_MOCKER = (
    Profile(  # its polynomials name no model; cache and KV size are those of its command's defaults
        DynamoMocker(), num_layers=32, kv_bytes_per_token=131_072, kv_capacity=16_384 * 64
    )
)


def find_profile(name: str) -> Profile:
    """MODEL@GPU, "dynamo-mocker", or the JSON file of that name. Raises ConfigError."""
    if name == "dynamo-mocker":
        return DYNAMO_MOCKER
    model, _at, gpu = name.partition("@")
    if model in MODELS and gpu in GPUS:
        return _derive(MODELS[model], GPUS[gpu], name)
    if Path(name).is_file():
        return _read(Path(name))
    raise ConfigError(
        f"--sim-profile is {name!r}; give MODEL@GPU with MODEL one of {', '.join(MODELS)} and GPU one of "
        f"{', '.join(GPUS)}, or dynamo-mocker, or a JSON file"
    )


def _derive(model: _Model, gpu: _Gpu, name: str) -> Profile:
    weight_bytes = model.parameters * BYTES_PER_VALUE
    kv_bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_size * BYTES_PER_VALUE
    kv_capacity = int((gpu.memory_bytes * MEMORY_SHARE - weight_bytes) // kv_bytes_per_token)
    if kv_capacity <= 0:
        raise ConfigError(f"{name}: weights of {weight_bytes / 1e9:.0f} GB leave no memory for KV")
    timing = Roofline(
        parameters=model.parameters,
        weight_bytes=weight_bytes,
        attention_width=model.num_layers * model.num_heads * model.head_size,
        kv_bytes_per_token=kv_bytes_per_token,
        flops=gpu.flops * FLOPS_SHARE,
        bytes_per_s=gpu.bytes_per_s * BANDWIDTH_SHARE,
    )
    return Profile(timing, model.num_layers, kv_bytes_per_token, kv_capacity)


def _read(path: Path) -> Profile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--sim-profile {path}: {error}") from error
