"""A vLLM engine on a GPU: each layer's KV is taken once its event has happened. Run where vLLM is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model
from vllm_bench import Bench, Copier, greedy, random_prompt

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineRequest
from dynrt.engines.vllm.environment import prepare_process
from dynrt.transfer.local import BlocksReady

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CHUNK = 64  # tokens in a step


class StreamCopier(Copier):
    """Copies on a stream of its own, which waits for each layer's event and for nothing else of the computation."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.stream = torch.cuda.Stream()
        self.events: list[torch.cuda.Event] = []
        context = engine._llm.vllm_config.compilation_config.static_forward_context
        self._caches = [context[name].kv_cache for name in engine._link.ranks.layout.layers]

    def layer_written(self, layer: int, event: object | None) -> None:
        assert isinstance(event, torch.cuda.Event), "without it, nobody knows when the layer is written"
        self.events.append(event)
        self.stream.wait_event(event)
        super().layer_written(layer, None)

    def _copy(self, blocks: BlocksReady, layer: int) -> None:
        target = self.targets.get((blocks.key, blocks.epoch))
        if target is None:
            return
        with torch.cuda.stream(self.stream):
            for index, source in enumerate(blocks.block_ids, blocks.first_block - target.first_block):
                self._caches[layer][target.block_ids[index]].copy_(self._caches[layer][source])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), head_size=64)
    config = EngineConfig(
        str(model_dir),
        "tiny",
        kind="vllm",
        dtype="bfloat16",
        kv_blocks=64,
        max_batch_tokens=CHUNK,
        engine_args={"attention_backend": "FLASH_ATTN"},
    )
    prepare_process(config)
    from dynrt.engines.vllm.engine import VllmEngine

    engine = VllmEngine(config)
    bench = Bench(engine)
    bench.copier = StreamCopier(engine)
    yield bench
    bench.assert_clean()
    engine.close()


def test_graphs_are_piecewise(bench: Bench) -> None:
    assert bench.engine._llm.vllm_config.compilation_config.cudagraph_mode.name == "PIECEWISE"


@pytest.mark.parametrize("num_tokens", [33, 64, 200])
def test_what_was_taken_behind_the_events_is_what_was_computed(bench: Bench, num_tokens: int) -> None:
    copier = bench.copier
    assert isinstance(copier, StreamCopier)
    copier.events.clear()
    copier.announced.clear()
    prompt = random_prompt(num_tokens, seed=num_tokens)
    prefill, decode = bench.new_id(), bench.new_id()
    target = bench.reserve(EngineRequest(*decode, prompt, greedy()))
    copier.aim(prefill, target)
    bench.engine.submit(EngineRequest(*prefill, prompt, greedy(), salt="prefill", prefill_only=True))
    bench.run(lambda: bool(bench.ids(prefill)))
    torch.cuda.synchronize()
    assert len(copier.events) == copier.num_layers * -(-num_tokens // CHUNK)
    source = [block_id for blocks in copier.announced for block_id in blocks.block_ids]
    for cache in copier._caches:
        for ours, theirs in list(zip(source, target.block_ids, strict=True))[: num_tokens // 32]:
            assert torch.equal(cache[ours], cache[theirs])
    bench.engine.release(*prefill)
    bench.engine.commit(*decode, None)
    bench.run()
    assert len(bench.ids(decode)) == 12
