"""Reads a Hugging Face config.json into what the native engine can compute, or says what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from dynrt.engines.models.directory import TokenIds, eos_token_ids, read_json
from dynrt.runtime.errors import ModelLoadError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

T = TypeVar("T")


class LinearScaling(msgspec.Struct, frozen=True):
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary position embedding."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int  # tokens, prompt and output together
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads is {self.num_heads}; "
                f"it must be a multiple of num_key_value_heads, {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ModelLoadError(f"head_dim is {self.head_size}; rotary embedding needs an even one")

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json.

        Raises ModelLoadError if they are missing, malformed, or describe a model that cannot be computed here.
        """
        model_dir = Path(model_dir)
        raw = read_json(model_dir / "config.json", _HfConfig)
        _refuse_unsupported(raw)
        is_qwen2 = raw.architectures[0] == "Qwen2ForCausalLM"
        return cls(
            architecture=raw.architectures[0],
            num_layers=raw.num_hidden_layers,
            hidden_size=raw.hidden_size,
            num_heads=raw.num_attention_heads,
            num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
            head_size=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
            intermediate_size=raw.intermediate_size,
            vocab_size=raw.vocab_size,
            context_length=raw.max_position_embeddings,
            rms_norm_eps=raw.rms_norm_eps,
            rope=_rope(raw),
            tie_embeddings=raw.tie_word_embeddings,
            qkv_bias=is_qwen2 or raw.attention_bias,
            o_bias=not is_qwen2 and raw.attention_bias,
            mlp_bias=not is_qwen2 and raw.mlp_bias,
            eos_token_ids=eos_token_ids(model_dir, raw.eos_token_id),
        )


class _HfRope(msgspec.Struct):
    """`rope_scaling` (until transformers 4) or `rope_parameters` (since transformers 5)."""

    rope_type: str | None = None
    type: str | None = None  # the oldest name of rope_type
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: float = 1.0
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None


class _HfConfig(msgspec.Struct):
    """The fields of config.json that matter here, with the defaults that transformers gives them."""

    architectures: Annotated[list[str], msgspec.Meta(min_length=1)]
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: _HfRope | None = None
    rope_parameters: _HfRope | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, object] | None = None
    eos_token_id: TokenIds = None


def _refuse_unsupported(raw: _HfConfig) -> None:
    """Raise ModelLoadError for whatever would compute something else than the model's authors meant."""
    if raw.architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise _unsupported("architecture", raw.architectures[0], SUPPORTED_ARCHITECTURES)
    if raw.hidden_act != "silu":
        raise _unsupported("hidden_act", raw.hidden_act, ("silu",))
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method")
        raise _unsupported("quantization", method, ("none: float32, float16 or bfloat16 weights",))
    for layer_type in raw.layer_types or ():
        if layer_type != "full_attention":
            raise _unsupported("layer type", layer_type, ("full_attention",))
    uses_window = raw.sliding_window is not None if raw.use_sliding_window is None else raw.use_sliding_window
    if uses_window and not raw.layer_types:
        raise _unsupported("sliding_window", raw.sliding_window, ("none: full attention",))


def _unsupported(what: str, value: object, supported: tuple[str, ...]) -> ModelLoadError:
    return ModelLoadError(
        f"{what} {value!r} is not supported by the native engine; supported: {', '.join(supported)}"
    )


def _rope(raw: _HfConfig) -> RopeConfig:
    rope = raw.rope_parameters or raw.rope_scaling or _HfRope()
    if raw.partial_rotary_factor != 1.0 or rope.partial_rotary_factor != 1.0:
        factor = min(raw.partial_rotary_factor, rope.partial_rotary_factor)
        raise _unsupported("partial_rotary_factor", factor, ("1.0",))
    return RopeConfig(theta=rope.rope_theta or raw.rope_theta, scaling=_rope_scaling(rope))


def _rope_scaling(rope: _HfRope) -> LinearScaling | Llama3Scaling | None:
    match rope.rope_type or rope.type or "default":
        case "default":
            return None
        case "linear":
            return LinearScaling(_required(rope.factor, "factor", "linear"))
        case "llama3":
            return Llama3Scaling(
                factor=_required(rope.factor, "factor", "llama3"),
                low_freq_factor=_required(rope.low_freq_factor, "low_freq_factor", "llama3"),
                high_freq_factor=_required(rope.high_freq_factor, "high_freq_factor", "llama3"),
                original_context=_required(
                    rope.original_max_position_embeddings, "original_max_position_embeddings", "llama3"
                ),
            )
        case unknown:
            raise _unsupported("rope type", unknown, SUPPORTED_ROPE_TYPES)


def _required(value: T | None, field: str, rope_type: str) -> T:
    if value is None:
        raise ModelLoadError(f"rope type {rope_type!r} needs the field {field} in config.json")
    return value
