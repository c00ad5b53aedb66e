"""ModelConfig: what it reads from config.json of several ages, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynrt.engines.native.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig
from dynrt.runtime.errors import ModelLoadError

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(**changes: Any) -> dict[str, Any]:
    """A Llama 3.2 1B config.json, changed. None takes a field away."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
        "eos_token_id": [128001, 128008, 128009],
        "an_unknown_field": {"is": "ignored"},
    } | changes
    return {field: value for field, value in config.items() if value is not None}


def read(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_dir(path)


def test_reads_every_field(tmp_path: Path) -> None:
    config = read(tmp_path, hf_config())
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=16,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=8,
        head_size=64,
        intermediate_size=8192,
        vocab_size=128256,
        context_length=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        tie_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_fields_that_old_configs_lack_have_transformers_defaults(tmp_path: Path) -> None:
    lacking = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias")
    lacking += ("mlp_bias", "hidden_act", "rope_theta", "rope_scaling", "eos_token_id")
    config = read(tmp_path, hf_config(**dict.fromkeys(lacking)))
    assert (config.num_kv_heads, config.head_size, config.rms_norm_eps) == (32, 64, 1e-6)
    assert (config.tie_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (False,) * 4
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, RopeConfig(7.0)),
        ({"rope_parameters": {"rope_theta": 7.0} | LLAMA3_SCALING}, RopeConfig(7.0, Llama3Scaling(32, 1, 4, 8192))),
        ({"rope_theta": 7, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(7.0, LinearScaling(2.0))),
        ({"rope_theta": 7.0, "rope_scaling": None}, RopeConfig(7.0)),
    ],
    ids=["transformers 5", "transformers 5 scaled", "oldest", "plain"],
)  # fmt: skip
def test_reads_rope_of_every_age(tmp_path: Path, fields: dict[str, Any], expected: RopeConfig) -> None:
    bare = hf_config(rope_theta=None, rope_scaling=None)
    assert read(tmp_path, bare | fields).rope == expected


def test_qwen2_has_biases_on_q_k_v_only(tmp_path: Path) -> None:
    config = read(
        tmp_path, hf_config(architectures=["Qwen2ForCausalLM"], sliding_window=4096, use_sliding_window=False)
    )
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [(2, {"eos_token_id": [5, 6]}, (5, 6)), (2, {"eos_token_id": 7}, (7,)), (2, {}, (2,)), (2, None, (2,))],
)
def test_eos_comes_from_the_generation_config_first(
    tmp_path: Path, of_config: int, of_generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, hf_config(eos_token_id=of_config), of_generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' .* LlamaForCausalLM, Qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .* silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' .* default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' needs the field low_freq_factor"),
        ({"sliding_window": 4096}, "sliding_window 4096 .* full attention"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer type 'sliding_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq'"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32.* 5"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"hidden_size": None}, "config.json: .*hidden_size"),
        ({"vocab_size": "many"}, r"config.json: Expected `int`, got `str` - at `\$.vocab_size`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_refuses_what_it_cannot_compute(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, hf_config(**changes))


def test_names_a_missing_or_malformed_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json: No such file"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: "):
        ModelConfig.from_dir(tmp_path)
