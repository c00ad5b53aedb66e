"""Checkpoint: reads one file or several, and refuses tensors that do not fit the config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from dynrt.engines.native.config import ModelConfig
from dynrt.engines.native.weights import Checkpoint, expected_shapes
from dynrt.runtime.errors import ModelLoadError

Tensors = dict[str, torch.Tensor]


def open_checkpoint(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(path, ModelConfig.from_dir(path), dtype=dtype, device=torch.device("cpu"))


def rewrite(path: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole", num_layers=2)
    sharded = write_tiny_model(tmp_path / "sharded", num_layers=2, shards=3)
    assert not (sharded / "model.safetensors").exists()
    ours, theirs = open_checkpoint(whole), open_checkpoint(sharded)
    names = [name for name, _ in expected_shapes(ModelConfig.from_dir(whole))]
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in names)


def test_converts_to_the_dtype_asked_for(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, num_layers=1, dtype=torch.float16)
    assert open_checkpoint(path, torch.bfloat16).tensor("model.norm.weight").dtype is torch.bfloat16


def test_stacks_in_the_order_of_the_names(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tmp_path, num_layers=1))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv"]
    stacked = checkpoint.stacked(names)
    assert torch.equal(stacked[:32], checkpoint.tensor(names[0]))
    assert torch.equal(stacked[32:], checkpoint.tensor(names[1]))


def test_ignores_a_tied_heads_copy_and_stored_frequencies(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, num_layers=1)

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(path, add)
    open_checkpoint(path)


def remove_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def add_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


def narrow_embedding(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = torch.ones(512, 63)


def quantise(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_norm, r"lacks model\.norm\.weight"),
        (add_bias, r"holds model\.layers\.0\.self_attn\.q_proj\.bias"),
        (narrow_embedding, r"embed_tokens\.weight has shape \[512, 63\]; config\.json says \[512, 64\]"),
        (quantise, r"model\.norm\.weight is stored as I8; supported: F32, F16, BF16"),
    ],
)
def test_refuses_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    path = write_tiny_model(tmp_path, num_layers=1)
    rewrite(path, change)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(path)


def test_names_few_of_many_missing_tensors(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, num_layers=1, extra_config={"num_hidden_layers": 1})
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.1\.[^ ]+, .* and 14 more tensors"):
        open_checkpoint(path)


def test_names_a_missing_broken_or_unlisted_file(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, num_layers=1)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a whole safetensors file"):
        open_checkpoint(path)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is missing"):
        open_checkpoint(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    with pytest.raises(ModelLoadError, match=r"part\.safetensors is missing"):
        open_checkpoint(path)
    (path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"index\.json: Expected `object`"):
        open_checkpoint(path)
