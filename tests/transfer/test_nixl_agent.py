"""Tests of one NIXL agent: which backends it is given."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from dynrt.transfer.agent import NixlError
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.nixl_agent import NixlAgent

SHAPE = KvGeometry(num_layers=1, num_blocks=4, block_size=16, num_kv_heads=2, head_size=8, dtype="float32")


def open_agent(memory: np.ndarray, *backends: str) -> NixlAgent:
    region = KvRegion(memory.ctypes.data, memory.nbytes)
    return NixlAgent(f"agent-{secrets.token_hex(4)}", 0, SHAPE, [region], backends)


def test_backend_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    memory = np.zeros(SHAPE.num_blocks * SHAPE.layer_block_bytes, dtype=np.uint8)
    with pytest.raises(NixlError, match=r"no backend 'CARRIER_PIGEON'; it has .*UCX"):
        open_agent(memory, "UCX", "CARRIER_PIGEON")


def test_several_backends_register_the_same_memory() -> None:
    memory = np.zeros(SHAPE.num_blocks * SHAPE.layer_block_bytes, dtype=np.uint8)
    agent = open_agent(memory, "UCX", "POSIX")
    agent.close()
