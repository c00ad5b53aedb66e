"""What is refused of the settings of a vLLM engine before vLLM is imported."""

from __future__ import annotations

import os

import pytest

from dynrt.engines.config import EngineConfig, check_kv_connector, engine_args_for, engine_args_of
from dynrt.engines.vllm.environment import openmp_threads
from dynrt.engines.vllm.versions import check_version
from dynrt.runtime.errors import ConfigError
from dynrt.transfer.options import TransferOptions


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5", "0.32.1+cpu"])
def test_known_version(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.32.0", "dev"])
def test_unknown_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM is {version}; .* knows 0\.32\.x"):
        check_version(version)


def test_engine_args() -> None:
    pairs = ["max_model_len=4096", 'compilation_config={"mode": 0}', "quantization=a=b"]
    expected = {"max_model_len": "4096", "compilation_config": '{"mode": 0}', "quantization": "a=b"}
    assert engine_args_of("vllm", pairs) == expected
    assert engine_args_of("native", []) == {}


@pytest.mark.parametrize("pair", ["max_model_len", "=3"])
def test_engine_arg_that_is_no_pair(pair: str) -> None:
    with pytest.raises(ConfigError, match=f"--engine-arg is '{pair}'; write NAME=VALUE"):
        engine_args_of("vllm", [pair])


def test_engine_arg_for_another_engine() -> None:
    with pytest.raises(ConfigError, match="is for --engine vllm; --engine is 'native'"):
        engine_args_of("native", ["max_model_len=1"])


def test_engine_args_of_one_pool_win_over_those_of_all() -> None:
    given = engine_args_of("vllm", ["decode:max_num_seqs=64", "max_num_seqs=8", "prefill:block_size=64"])
    assert engine_args_for("prefill", given) == {"max_num_seqs": "8", "block_size": "64"}
    assert engine_args_for("decode", given) == {"max_num_seqs": "64"}
    assert engine_args_for("both", given) == {"max_num_seqs": "8"}


def test_engine_arg_for_a_pool_that_is_none() -> None:
    with pytest.raises(ConfigError, match="--engine-arg both:block_size: a pool is prefill or decode"):
        engine_args_of("vllm", ["both:block_size=64"])


def test_own_connector_is_vllms_alone() -> None:
    check_kv_connector("layerwise", "native", TransferOptions(verify=True))
    check_kv_connector("nixl-pull", "vllm", TransferOptions())
    with pytest.raises(ConfigError, match="nixl-pull is vLLM's own, for --engine vllm; --engine is 'native'"):
        check_kv_connector("nixl-pull", "native", TransferOptions())
    with pytest.raises(ConfigError, match="--verify-kv checks what the layer-wise push brings"):
        check_kv_connector("nixl-pull", "vllm", TransferOptions(verify=True))


def test_ranks_share_the_cores_unless_told_otherwise() -> None:
    def threads(threads: int | None = None, **engine_args: str) -> int | None:
        return openmp_threads(
            EngineConfig("model", "model", kind="vllm", threads=threads, engine_args=engine_args)
        )

    assert threads(tensor_parallel_size="2") == max(1, len(os.sched_getaffinity(0)) // 2)
    assert threads(tensor_parallel_size="100000") == 1
    assert threads(3, tensor_parallel_size="2") == 3
    assert threads() is threads(tensor_parallel_size="1") is threads(tensor_parallel_size="two") is None
