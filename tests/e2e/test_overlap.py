"""The KV cache travels while the prefill is still computing: seen in the traces of two real engines."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from rig.engine_pair import EnginePair

from dynrt.engines.config import EngineConfig
from dynrt.engines.models.resolve import prepare
from dynrt.transfer.trace import TraceEvent

PROMPT_TOKENS = 2000

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def test_decode_has_a_layer_before_prefill_has_computed_the_one_after_next(tmp_path: Path) -> None:
    model = prepare(None, print)
    config = EngineConfig(model.path, model.name, threads=1, max_batch_tokens=PROMPT_TOKENS)
    prompt_ids = [random.Random(3).randrange(30_000) for _ in range(PROMPT_TOKENS)]
    pair = EnginePair(config, tmp_path)
    async with pair:
        run = await pair.run(prompt_ids, "layerwise")
        assert run.token_ids[1:] == await pair.continuation(prompt_ids, run.token_ids[0])
    written_at = [event.at for event in pair.trace("prefill") if event.kind == "written"]
    received_at = _received_at(pair.trace("decode"), len(written_at))
    assert all(earlier < later for earlier, later in pairwise(written_at))
    for layer in range(len(written_at) - 3):
        # Layer i + 2 is computed when the KV of layer i + 3 is about to be written.
        assert received_at[layer] < written_at[layer + 3], f"layer {layer} came late"


def _received_at(trace: list[TraceEvent], num_layers: int) -> list[float]:
    """When decode had all blocks of each layer."""
    received_at = [0.0] * num_layers
    for event in trace:
        if event.kind == "received":
            for layer in range(event.first_layer, event.first_layer + event.num_layers):
                received_at[layer] = event.at
    assert all(received_at), "a layer never came"
    return received_at
