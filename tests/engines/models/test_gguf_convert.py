"""GGUF to Hugging Face directory: rows, biases, rounding, RoPE scaling, tokenizer, and files that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TEMPLATE, TOKENS, write_tiny_gguf
from tokenizers import Tokenizer

from dynrt.engines.models.gguf_convert import convert
from dynrt.engines.models.safetensors_file import round_to_bf16
from dynrt.runtime.errors import ModelLoadError


def converted(tmp_path: Path, **spec: Any) -> tuple[Path, dict[str, np.ndarray]]:
    gguf, out = tmp_path / "tiny.gguf", tmp_path / "out"
    source = write_tiny_gguf(gguf, **spec)
    out.mkdir()
    convert(gguf, out, lambda line: None)
    return out, source


def stored(values: np.ndarray) -> np.ndarray:
    """What a matrix is once it was written as Q8_0."""
    return dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)


def loaded(out: Path) -> dict[str, Any]:
    with safe_open(out / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: element j of half h goes to 2j + h, head by head."""
    out = np.empty_like(rows)
    for head in range(heads):
        for half in range(2):
            for j in range(HEAD_DIM // 2):
                out[head * HEAD_DIM + 2 * j + half] = rows[head * HEAD_DIM + half * HEAD_DIM // 2 + j]
    return out


def test_weights_are_complete_and_loaded_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out, _ = converted(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.tie_word_embeddings and model.config.eos_token_id == [0]


def test_llama_query_and_key_rows_are_put_back(tmp_path: Path) -> None:
    import torch

    generator = np.random.default_rng(1)
    q = stored(generator.standard_normal((HIDDEN, HIDDEN)).astype(np.float32))
    k = stored(generator.standard_normal((KV_HEADS * HEAD_DIM, HIDDEN)).astype(np.float32))
    tensors = {"blk.1.attn_q.weight": interleaved(q, HEADS), "blk.1.attn_k.weight": interleaved(k, KV_HEADS)}
    out, source = converted(tmp_path, tensors=tensors)
    weights = loaded(out)
    for name, expected in {"q": q, "k": k, "v": stored(source["blk.1.attn_v.weight"])}.items():
        expected_bf16 = torch.from_numpy(expected).to(torch.bfloat16)
        assert torch.equal(weights[f"model.layers.1.self_attn.{name}_proj.weight"], expected_bf16)


def test_qwen2_has_biases_and_rows_as_they_are(tmp_path: Path) -> None:
    import torch

    out, source = converted(tmp_path, architecture="qwen2", metadata={"tokenizer.ggml.pre": "qwen2"})
    weights = loaded(out)
    q = stored(source["blk.0.attn_q.weight"])
    assert torch.equal(
        weights["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(q).to(torch.bfloat16)
    )
    bias = torch.from_numpy(source["blk.0.attn_k.bias"]).to(torch.bfloat16)
    assert torch.equal(weights["model.layers.0.self_attn.k_proj.bias"], bias)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["max_position_embeddings"] == 128


def test_an_output_tensor_means_that_the_head_is_not_tied(tmp_path: Path) -> None:
    head = np.ones((len(TOKENS), HIDDEN), np.float32)
    out, _ = converted(tmp_path, tensors={"output.weight": head})
    assert loaded(out)["lm_head.weight"].shape == head.shape
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_rounding_is_that_of_torch(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bf16(array), expected)


# --- RoPE -----------------------------------------------------------------------------------------


def llama3_table(factor: float) -> np.ndarray:
    """As llama.cpp's converter writes it, frequency by frequency."""
    table = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


def test_llama3_scaling_is_recognised_by_its_table(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": llama3_table(32.0)}
    out, _ = converted(tmp_path, metadata={"llama.rope.freq_base": 500000.0}, tensors=tensors)
    assert json.loads((out / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_another_table_is_refused(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)}
    with pytest.raises(ModelLoadError, match="RoPE"):
        converted(tmp_path, tensors=tensors)


def test_linear_scaling(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    out, _ = converted(tmp_path, metadata=metadata)
    assert json.loads((out / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }


# --- tokenizer ------------------------------------------------------------------------------------


def tokens(out: Path, text: str) -> list[str]:
    return Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["hell", "o", "Ġw", "1", "2"]),
        ("gpt-2", ["hell", "o", "Ġw", "12"]),
        ("default", ["hell", "o", "Ġw", "12"]),
        (
            "llama-bpe",
            ["<|start|>", "hello", "Ġw", "12"],
        ),  # takes whole words, and adds BOS unless told otherwise
        ("qwen2", ["hell", "o", "Ġw", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_named_pre_tokenizer_says(tmp_path: Path, pre: str, expected: list[str]) -> None:
    out, _ = converted(tmp_path, metadata={"tokenizer.ggml.pre": pre})
    assert tokens(out, "hello w12") == expected


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    out, _ = converted(tmp_path, metadata={"tokenizer.ggml.pre": "qwen2"})
    assert tokens(out, "e\u0301") == tokens(out, "\u00e9")


def test_special_and_added_tokens(tmp_path: Path) -> None:
    out, _ = converted(tmp_path)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = tokenizer.encode("<|start|>he<tool><|end|>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<|start|>", "he", "<tool>", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool>"


def test_bos_is_added_if_the_file_says_so(tmp_path: Path) -> None:
    out, _ = converted(tmp_path, metadata={"tokenizer.ggml.add_bos_token": True})
    assert tokens(out, "he") == ["<|start|>", "he"]


def test_template_and_special_tokens_reach_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out, _ = converted(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.model_max_length) == (
        "<|start|>",
        "<|end|>",
        128,
    )


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"metadata": {"tokenizer.ggml.pre": "tekken"}}, "'tekken'.*smollm"),
        ({"metadata": {"tokenizer.ggml.pre": None}}, r"lacks the metadata tokenizer\.ggml\.pre"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, "SentencePiece.*Hugging Face directory"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": None}}, "ends a text"),
        ({"metadata": {"tokenizer.ggml.bos_token_id": 9999}}, "9999"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "8 of 16"),
        ({"metadata": {"llama.block_count": "two"}}, "int was expected"),
        ({"metadata": {"llama.block_count": 3}}, r"missing.*blk\.2\.attn_norm"),
        ({"metadata": {"split.count": 2}}, "split"),
        (
            {
                "metadata": {"llama.rope.scaling.type": "su"},
            },
            "rope.scaling.factor",
        ),
        ({"tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}}, r"unknown.*attn_q_norm"),
        ({"tensors": {"output_norm.weight": np.full(HIDDEN, np.nan, np.float32)}}, "not finite"),
        ({"architecture": "gemma3"}, "'gemma3'.*llama and qwen2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_converted_exactly_is_refused(
    tmp_path: Path, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        converted(tmp_path, **spec)


@pytest.mark.parametrize("kept", [0, 3, 4, 16, 40, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    content = gguf.read_bytes()
    gguf.write_bytes(content[: int(kept) if kept >= 1 else int(kept * len(content))])
    with pytest.raises(ModelLoadError, match=r"not a GGUF|cut off or damaged"):
        convert(gguf, tmp_path, lambda line: None)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04 a zip file, say")
    with pytest.raises(ModelLoadError, match=r"not a GGUF file.*PK"):
        convert(other, tmp_path, lambda line: None)
