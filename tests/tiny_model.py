"""Tiny random models in the Hugging Face format, so that tests need neither a download nor trained weights.

Greedy output is varied and, in float32, nearly always decided by more than 1e-3 between the two best tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, PAD_ID, IM_START_ID, IM_END_ID = range(5)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "LlamaForCausalLM",
    num_layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int | None = None,
    intermediate: int | None = None,
    vocab: int = 512,
    context: int = 2048,
    tied: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    extra_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, tokenizer and random weights to directory `path`; same arguments, same model. Returns `path`.

    `vocab`: at least 261 (256 bytes and SPECIAL_TOKENS). A Qwen2ForCausalLM always has q, k and v biases.
    `extra_config` is laid over config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    head_size = head_size or hidden // heads
    intermediate = intermediate or 3 * hidden
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    } | dict(extra_config or {})
    _write_json(path / "config.json", config)
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": PAD_ID},
    )
    _write_weights(path, _random_weights(config, seed), dtype, shards)
    _write_tokenizer(path, vocab, context)
    return path


def _random_weights(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: mean + std * torch.randn(shape, generator=generator)
        for name, shape, mean, std in _weight_specs(config)
    }


def _weight_specs(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, mean and standard deviation of every tensor.

    Layers get enough gain to move the residual stream away from the embedding they started from, else a tied
    head would only repeat its input.
    """
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    qkv_bias = config["attention_bias"] or config["model_type"] == "qwen2"
    linears = [  # name, rows, columns, gain, bias
        ("self_attn.q_proj", q_size, hidden, 1.5, qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, 1.5, qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, 1.5, qkv_bias),
        ("self_attn.o_proj", hidden, q_size, 1.5, config["attention_bias"]),
        ("mlp.gate_proj", ffn, hidden, 1.5, config["mlp_bias"]),
        ("mlp.up_proj", ffn, hidden, 1.5, config["mlp_bias"]),
        ("mlp.down_proj", hidden, ffn, 1.5, config["mlp_bias"]),
    ]
    yield "model.embed_tokens.weight", (vocab, hidden), 0.0, 0.4
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, gain, bias in linears:
            yield f"{prefix}{name}.weight", (rows, columns), 0.0, gain / columns**0.5
            if bias:
                yield f"{prefix}{name}.bias", (rows,), 0.0, 0.2
        yield f"{prefix}input_layernorm.weight", (hidden,), 1.0, 0.1
        yield f"{prefix}post_attention_layernorm.weight", (hidden,), 1.0, 0.1
    yield "model.norm.weight", (hidden,), 1.0, 0.1
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden), 0.0, 0.4


def _write_weights(path: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype, shards: int) -> None:
    cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
    if shards == 1:
        save_file(cast, path / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(cast)}
    for file in files:
        members = {name: tensor for name, tensor in cast.items() if weight_map[name] == file}
        save_file(members, path / file, metadata={"format": "pt"})
    num_bytes = sum(tensor.nbytes for tensor in cast.values())
    _write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": num_bytes}, "weight_map": weight_map},
    )


def _write_tokenizer(path: Path, vocab: int, context: int) -> None:
    """Byte-level BPE: the specials, the 256 bytes, and pairs of them (of letters first) up to `vocab`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (not char.islower(), char))
    num_merges = vocab - len(SPECIAL_TOKENS) - len(alphabet)
    assert 0 <= num_merges <= len(alphabet) ** 2, f"vocab is {vocab}"
    merges = [(a, b) for a in alphabet for b in alphabet][:num_merges]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
