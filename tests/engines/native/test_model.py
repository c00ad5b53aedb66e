"""Model.forward: equal to transformers, however a sequence is cut, batched and laid out in the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from dynrt.engines.native.attention import group_by_length
from dynrt.engines.native.linear import Linear
from dynrt.engines.native.model import Model, default_dtype, load_model
from dynrt.engines.scheduling.batch import Chunk, SampleSpec
from dynrt.runtime.messages import SamplingParams
from dynrt.transfer.layout import KvGeometry

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # other shapes choose other kernels; logits have a standard deviation of about 3
BLOCK_SIZE = 8
SAMPLE = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), position=0)

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, wide heads, sharded": {"tied": False, "head_size": 32, "shards": 3},
    "one kv head per head, biases": {"kv_heads": 4, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "kv_heads": 1},
    "qwen2 untied": {"architecture": "Qwen2ForCausalLM", "tied": False},
    "llama3 scaling": {"extra_config": {"rope_parameters": {"rope_theta": 500000.0} | LLAMA3_SCALING}},
    "llama3 scaling, older": {"extra_config": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}},
    "linear scaling": {"extra_config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}},
}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Model:
    return load_model(tiny_model_dir, torch.float32, CPU)


def random_ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 512) for _ in range(count)]


def shuffled_blocks(num_tokens: Sequence[int], seed: int = 0) -> tuple[list[list[int]], int]:
    """A scattered block table for each of the sequences, and the size of the cache they are scattered over."""
    counts = [-(-tokens // BLOCK_SIZE) for tokens in num_tokens]
    num_blocks = sum(counts) + 3
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    return [[free.pop() for _ in range(count)] for count in counts], num_blocks


def forward_alone(model: Model, token_ids: list[int]) -> torch.Tensor:
    """Logits behind the last token of a sequence that is computed in one go, in a cache of its own."""
    block_ids, num_blocks = shuffled_blocks([len(token_ids)])
    kv = model.new_kv_cache(num_blocks, BLOCK_SIZE)
    return model.forward([Chunk(token_ids, 0, block_ids[0], SAMPLE)], kv)[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str) -> None:
    from transformers import AutoModelForCausalLM  # seconds to import

    path = write_tiny_model(tmp_path, **VARIANTS[variant])
    token_ids = random_ids(150)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    model = load_model(path, torch.float32, CPU)
    (block_ids,), num_blocks = shuffled_blocks([len(token_ids)])
    kv = model.new_kv_cache(num_blocks, BLOCK_SIZE)
    for start, end in ((0, 70), (70, 71), (71, 135), (135, 149), (149, 150)):
        logits = model.forward([Chunk(token_ids[start:end], start, block_ids, SAMPLE)], kv)
        assert logits.dtype is torch.float32
        assert_close(logits[0], expected[end - 1])


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_any_cutting_batching_and_placing_gives_the_same(model: Model, rng: random.Random) -> None:
    sequences = [random_ids(rng.choice([1, 2, 7, 40, 90]), seed=i) for i in range(rng.randint(1, 5))]
    tables, num_blocks = shuffled_blocks([len(ids) for ids in sequences], seed=rng.getrandbits(32))
    kv = model.new_kv_cache(num_blocks, BLOCK_SIZE)
    done = [0] * len(sequences)
    while any(done[i] < len(ids) for i, ids in enumerate(sequences)):
        unfinished = [i for i, ids in enumerate(sequences) if done[i] < len(ids)]
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        chunks = []
        for i in chosen:
            end = min(len(sequences[i]), done[i] + rng.choice([1, 1, 5, 16, 60]))
            wanted = SAMPLE if end == len(sequences[i]) else None
            chunks.append(Chunk(sequences[i][done[i] : end], done[i], tables[i], wanted))
            done[i] = end
        logits = model.forward(chunks, kv)
        finished = [i for i, chunk in zip(chosen, chunks, strict=True) if chunk.sample is not None]
        assert logits.shape == (len(finished), 512)
        for row, i in zip(logits, finished, strict=True):
            assert_close(row, forward_alone(model, sequences[i]))


def test_decodes_of_very_different_lengths_in_one_step(model: Model) -> None:
    lengths = (3, 900, 17, 301, 40)
    sequences = [random_ids(length, seed=length) for length in lengths]
    tables, num_blocks = shuffled_blocks(lengths)
    kv = model.new_kv_cache(num_blocks, BLOCK_SIZE)
    pairs = list(zip(sequences, tables, strict=True))
    model.forward([Chunk(ids[:-1], 0, table, None) for ids, table in pairs], kv)
    logits = model.forward([Chunk(ids[-1:], len(ids) - 1, table, SAMPLE) for ids, table in pairs], kv)
    for row, ids in zip(logits, sequences, strict=True):
        assert_close(row, forward_alone(model, ids))


def test_nothing_in_other_sequences_blocks_matters_not_even_nan(model: Model) -> None:
    sequences = [random_ids(3), random_ids(60, seed=1), random_ids(30, seed=2)]
    tables, num_blocks = shuffled_blocks([len(ids) for ids in sequences])
    kv = model.new_kv_cache(num_blocks, BLOCK_SIZE)
    used = {block_id for table in tables for block_id in table}
    for layer in kv:
        layer[[block_id for block_id in range(num_blocks) if block_id not in used]] = float("nan")
    model.forward([Chunk(ids[:-1], 0, table, None) for ids, table in zip(sequences, tables, strict=True)], kv)
    for layer in kv:
        layer[tables[2]] = float("nan")  # the third sequence is gone
    chunks = [Chunk(sequences[i][-1:], len(sequences[i]) - 1, tables[i], SAMPLE) for i in (0, 1)]
    for row, ids in zip(model.forward(chunks, kv), sequences, strict=False):
        assert_close(row, forward_alone(model, ids))


def test_block_tables_may_be_longer_than_the_chunk(model: Model) -> None:
    token_ids = random_ids(20)
    kv = model.new_kv_cache(12, BLOCK_SIZE)
    table = [7, 2, 9, 4, 11, 0]
    model.forward([Chunk(token_ids[:19], 0, table, None)], kv)
    logits = model.forward([Chunk(token_ids[19:], 19, table, SAMPLE)], kv)
    assert_close(logits[0], forward_alone(model, token_ids))


def test_each_layers_kv_is_complete_when_it_is_announced(model: Model) -> None:
    token_ids = random_ids(50)
    (table,), num_blocks = shuffled_blocks([len(token_ids)])
    expected = model.new_kv_cache(num_blocks, BLOCK_SIZE)
    model.forward([Chunk(token_ids, 0, table, None)], expected)
    kv = model.new_kv_cache(num_blocks, BLOCK_SIZE)
    model.forward([Chunk(token_ids[:20], 0, table, None)], kv)
    untouched = [layer.clone() for layer in kv]
    announced: list[int] = []

    def on_layer_written(layer: int, event: object | None) -> None:
        assert event is None
        assert_close(kv[layer], expected[layer])
        assert all(torch.equal(kv[later], untouched[later]) for later in range(layer + 1, len(kv)))
        announced.append(layer)

    model.forward([Chunk(token_ids[20:], 20, table, None)], kv, on_layer_written)
    assert announced == list(range(model.config.num_layers))


def test_cache_has_the_layout_that_transfers_expect(model: Model) -> None:
    kv = model.new_kv_cache(num_blocks=5, block_size=BLOCK_SIZE)
    geometry = KvGeometry(
        num_layers=model.config.num_layers,
        num_blocks=5,
        block_size=BLOCK_SIZE,
        num_kv_heads=model.config.num_kv_heads,
        head_size=model.config.head_size,
        dtype="float32",
    )
    assert len(kv) == geometry.num_layers
    for layer in kv:
        assert layer.is_contiguous()
        assert layer.stride(0) * layer.element_size() == geometry.layer_block_bytes
        assert layer.nbytes == geometry.num_blocks * geometry.layer_block_bytes
    model.forward([Chunk(random_ids(1), BLOCK_SIZE + 3, [1, 4], None)], kv)
    written = kv[0].abs().sum(dim=(-1, -2)).nonzero().tolist()
    assert written == [[4, 0, 3], [4, 1, 3]], "[block, K or V, token]"


def test_without_samples_there_are_no_logits(model: Model) -> None:
    kv = model.new_kv_cache(3, BLOCK_SIZE)
    assert model.forward([Chunk(random_ids(9), 0, [0, 1], None)], kv).shape == (0, 512)


def test_bfloat16_is_close_to_float32(tiny_model_dir: Path, model: Model) -> None:
    token_ids = random_ids(40)
    rough = load_model(tiny_model_dir, torch.bfloat16, CPU)
    assert rough.new_kv_cache(1, BLOCK_SIZE)[0].dtype is torch.bfloat16
    correlation = torch.corrcoef(
        torch.stack((forward_alone(rough, token_ids), forward_alone(model, token_ids)))
    )
    assert correlation[0, 1] > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prepacked_weights_multiply_like_plain_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 32), (48,)))
    for rows in (1, 7, 64):
        x = torch.randn(rows, 32, generator=generator).to(dtype)
        for some_bias in (None, bias):
            expected = torch.nn.functional.linear(x, weight, some_bias)
            torch.testing.assert_close(Linear(weight, some_bias)(x), expected, rtol=2e-2, atol=1e-2)


def test_default_dtype_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_dtype(torch.device("cuda")) is torch.bfloat16
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda answer=supported: answer)
        assert default_dtype(CPU) is expected


@given(st.lists(st.integers(1, 100_000), max_size=40), st.integers(1, 200_000))
def test_groups_cover_all_within_their_limits(lengths: list[int], max_tokens: int) -> None:
    lengths.sort()
    groups = sorted(group_by_length(lengths, max_tokens))
    assert [i for first, end in groups for i in range(first, end)] == list(range(len(lengths)))
    for first, end in groups:
        assert first < end
        assert lengths[end - 1] <= 2 * max(lengths[first], 256) or end == first + 1
        assert lengths[end - 1] * (end - first) <= max_tokens or end == first + 1


def test_short_decodes_of_similar_length_share_a_group() -> None:
    assert group_by_length([3, 100, 250, 250], max_tokens=2000) == [(0, 4)]
    assert group_by_length([3, 100, 250, 5000], max_tokens=2000) == [(3, 4), (0, 3)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_computes_what_the_cpu_computes(tiny_model_dir: Path, model: Model, dtype: torch.dtype) -> None:
    on_cuda = load_model(tiny_model_dir, dtype, torch.device("cuda"))
    sequences = [random_ids(50), random_ids(20, seed=1), random_ids(300, seed=2)]
    tables, num_blocks = shuffled_blocks([len(ids) for ids in sequences])
    kv = on_cuda.new_kv_cache(num_blocks, BLOCK_SIZE)
    events: list[Any] = []
    starts = (30, 19, 299)  # a chunk behind a prefix, and two decodes
    before = [Chunk(ids[:n], 0, t, None) for ids, n, t in zip(sequences, starts, tables, strict=True)]
    on_cuda.forward(before, kv)
    chunks = [Chunk(ids[n:], n, t, SAMPLE) for ids, n, t in zip(sequences, starts, tables, strict=True)]
    logits = on_cuda.forward(chunks, kv, lambda _layer, event: events.append(event)).cpu()
    torch.cuda.synchronize()
    assert len(events) == on_cuda.config.num_layers
    assert all(event.query() for event in events)
    atol = 1e-3 if dtype is torch.float32 else 1.0
    for row, ids in zip(logits, sequences, strict=True):
        torch.testing.assert_close(row, forward_alone(model, ids), atol=atol, rtol=0.0)
