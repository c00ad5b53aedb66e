"""vLLM engines of several ranks, each rank a process. Run where vLLM is installed: test_vllm_in_environment.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch
from tiny_model import write_tiny_model
from vllm_bench import random_prompt
from vllm_pair import Pair, Worker

from dynrt.engines.config import EngineConfig
from dynrt.engines.vllm.environment import prepare_process
from dynrt.runtime.errors import ConfigError
from dynrt.transfer.events import Drained, Quiesced
from dynrt.transfer.mapping import Mismatch, map_kv
from dynrt.transfer.ucx import ucx_environment

NUM_BLOCKS = 28
CHUNK = 64  # tokens in a step


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), head_size=32)
    config = EngineConfig(
        str(model_dir),
        "tiny",
        kind="vllm",
        dtype="float32",
        threads=1,
        kv_blocks=NUM_BLOCKS,
        max_batch_tokens=CHUNK,
    )
    os.environ.update(ucx_environment(one_host=True))
    prepare_process(config)
    return config


class Rig(NamedTuple):
    pair: Pair
    two: Worker  # ranks, processes of their own
    one: Worker


@pytest.fixture(scope="module")
def rig(config: EngineConfig) -> Iterator[Rig]:
    from dynrt.engines.vllm.engine import VllmEngine

    of_two = msgspec.structs.replace(config, engine_args={"tensor_parallel_size": "2"})
    two = Worker("two-ranks", VllmEngine(of_two))
    one = Worker("one-rank", VllmEngine(config))
    yield Rig(Pair(one, two), two, one)
    one.stop()
    two.stop()


def test_each_rank_holds_its_heads(rig: Rig) -> None:
    geometry = rig.two.engine.info.geometry
    assert [(rank.num_kv_heads, [*rank.heads()]) for rank in geometry] == [(1, [0]), (1, [1])]
    assert [rank.model_kv_heads for rank in geometry] == [2, 2]
    pids = {rank.pid for rank in rig.two.engine.kv_memory()}
    assert len(pids) == 2 and os.getpid() not in pids


@pytest.mark.parametrize("num_tokens", [1, 32, 33, 300])
@pytest.mark.parametrize("is_to_one", [True, False], ids=["2 to 1", "1 to 2"])
def test_handed_off_is_local(rig: Rig, num_tokens: int, is_to_one: bool) -> None:
    source, target = (rig.two, rig.one) if is_to_one else (rig.one, rig.two)
    prompt = random_prompt(num_tokens, seed=num_tokens)
    local = rig.one.local(prompt, rig.pair.new_id(), salt="local")
    assert rig.pair.hand_off(source, target, prompt, salt=f"to {target.name}") == local and len(local) == 12


@pytest.mark.parametrize("is_to_one", [True, False], ids=["2 to 1", "1 to 2"])
@pytest.mark.parametrize("hits", ["prefill", "decode", "both"])
def test_prefix_hits(rig: Rig, hits: str, is_to_one: bool) -> None:
    source, target = (rig.two, rig.one) if is_to_one else (rig.one, rig.two)
    shared, salt = random_prompt(160, seed=7), f"{hits} {is_to_one}"
    prompt = shared + random_prompt(37, seed=8)
    for worker, name in ((source, "prefill"), (target, "decode")):
        if hits in (name, "both"):
            worker.local(shared, rig.pair.new_id(), salt=salt)
    handed = rig.pair.hand_off(source, target, prompt, salt=salt)
    assert handed == rig.one.local(prompt, rig.pair.new_id(), salt="alone")


def test_cancelled_in_mid_push(rig: Rig) -> None:
    request_id = rig.pair.open(rig.two, rig.one, random_prompt(300, seed=9), "cancelled")
    rig.two.turn()
    rig.pair.cancel(rig.two, rig.one, request_id)
    assert rig.pair.expect(rig.two, Quiesced).clean
    rig.pair.expect(rig.one, Drained)
    rig.pair.run_until(lambda: not any(w.engine.load().blocks_active for w in (rig.one, rig.two)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_rank_has_its_own_gpu(config: EngineConfig) -> None:
    from dynrt.engines.vllm.engine import VllmEngine

    on_gpus = msgspec.structs.replace(config, dtype="bfloat16", kv_blocks=None)
    ranks = {"tensor_parallel_size": "2", "gpu_memory_utilization": "0.3"}
    two = Worker("two-gpus", VllmEngine(msgspec.structs.replace(on_gpus, engine_args=ranks)), verify=False)
    alone = {"gpu_memory_utilization": "0.3"}
    one = Worker("one-gpu", VllmEngine(msgspec.structs.replace(on_gpus, engine_args=alone)), verify=False)
    assert [rank.device for rank in two.engine.kv_memory()] == [0, 1]
    pair, prompt = Pair(one, two), random_prompt(300, seed=10)
    for source, target in ((one, two), (two, one)):
        local = target.local(prompt, pair.new_id(), salt="local")
        handed = pair.hand_off(source, target, prompt, salt="handed")
        assert handed[0] == local[0], "later ones may differ by rounding"
    one.stop()
    two.stop()


def test_what_cannot_be_mapped_names_the_field(rig: Rig) -> None:
    ours, theirs = rig.two.engine.info.geometry, rig.one.engine.info.geometry
    larger = [msgspec.structs.replace(rank, block_size=64) for rank in theirs]
    assert map_kv(ours, larger) == Mismatch("block_size", 32, 64)


def test_a_size_that_the_model_does_not_have_is_refused(config: EngineConfig) -> None:
    from dynrt.engines.vllm.engine import VllmEngine

    for size, told in (("3", "must be divisible by tensor parallel size"), ("0", "it is a number of ranks")):
        with pytest.raises(ConfigError, match=told):
            VllmEngine(msgspec.structs.replace(config, engine_args={"tensor_parallel_size": size}))
