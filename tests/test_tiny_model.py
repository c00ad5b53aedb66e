"""The tiny model is what the tests that use it take for granted."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import EOS_ID, IM_END_ID, IM_START_ID, SPECIAL_TOKENS, write_tiny_model
from tokenizers import Tokenizer

from dynrt.engines.native.model import load_model
from dynrt.engines.scheduling.batch import Chunk, SampleSpec
from dynrt.runtime.messages import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_id_is_a_token_and_the_first_are_special(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 512
    assert [tokenizer.id_to_token(i) for i in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)
    ids = tokenizer.encode("<|im_start|>hi</s>").ids
    assert (ids[0], ids[-1]) == (IM_START_ID, EOS_ID)


def test_chat_template_is_chatml(tiny_model_dir: Path) -> None:
    config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    assert config["chat_template"] == (tiny_model_dir / "chat_template.jinja").read_text()
    template = jinja2.Template(config["chat_template"])
    text = template.render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_same_arguments_same_weights(tmp_path: Path) -> None:
    first, second, other = (
        write_tiny_model(tmp_path / name, num_layers=1, seed=seed) / "model.safetensors"
        for name, seed in (("first", 0), ("second", 0), ("other", 1))
    )
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_greedy_output_is_varied_and_clearly_decided(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, torch.float32, torch.device("cpu"))
    assert set(model.config.eos_token_ids) == {EOS_ID, IM_END_ID}
    kv = model.new_kv_cache(num_blocks=8, block_size=32)
    spec = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), position=0)
    new_ids, token_ids, margins = [40, 300], [], []
    for _ in range(100):
        chunk = Chunk(new_ids, len(token_ids), list(range(8)), spec)
        best = model.forward([chunk], kv)[0].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        token_ids += new_ids
        new_ids = [int(best.indices[0])]
    assert len(set(token_ids)) > 50
    assert sum(margin < 1e-3 for margin in margins) <= 2
