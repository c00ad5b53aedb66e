"""What the connector does on CUDA, as far as that can be seen without a GPU. Run where vLLM is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from dynrt.engines.config import EngineConfig
from dynrt.engines.vllm.environment import prepare_process
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.local import BlocksReady

GPU = 3
NUM_LAYERS = 2
GRAPH_MODES = ["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"]


class Gpu:
    """Stands for torch.cuda: a stream is the list of what was asked of it."""

    def __init__(self) -> None:
        self.stream: list[str] = []

    def Event(self) -> Gpu:  # noqa: N802
        return self

    def record(self, stream: list[str]) -> None:
        stream.append("event")

    def current_stream(self, device: int) -> list[str]:
        assert device == GPU
        return self.stream


class Hook:
    """Notes on the stream which layers were told."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def step_begins(self, ready: list[BlocksReady]) -> None:
        """What is ready does not matter here."""

    def layer_written(self, layer: int, event: object | None) -> None:
        assert event is self._gpu
        self._gpu.stream.append(f"told {layer}")


def layer_steps(connector: Any, gpu: Gpu, *, is_written_early: bool) -> None:
    """vLLM's calls around each layer, with what the backend asks of the stream."""
    for layer in range(NUM_LAYERS):
        writes = [f"write {layer}"]
        gpu.stream += writes if is_written_early else []
        connector.wait_for_layer_load(f"layers.{layer}")
        gpu.stream += ["attention"] if is_written_early else ["attention", *writes]
        connector.save_kv_layer(f"layers.{layer}", torch.empty(0), None)


@pytest.mark.parametrize("is_written_early", [True, False])
def test_event_behind_each_layers_write(monkeypatch: pytest.MonkeyPatch, is_written_early: bool) -> None:
    """At once, where the backend has written KV before its attention, so that the push overlaps with that."""
    from dynrt.engines.vllm.connector import DynrtConnector
    from dynrt.engines.vllm.layout import CacheLayout
    from dynrt.engines.vllm.link import Link
    from dynrt.engines.vllm.ranks import OneRank, StepMetadata
    from dynrt.engines.vllm.workers import OwnWorkerHalf

    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    geometry = KvGeometry(NUM_LAYERS, 8, 32, num_kv_heads=1, head_size=32, dtype="bfloat16")
    regions = [KvRegion(0, 0, device=GPU)] * NUM_LAYERS
    link = Link(32, OneRank())
    link.hook = Hook(gpu)
    connector = DynrtConnector.__new__(DynrtConnector)
    connector._worker = OwnWorkerHalf(link)
    connector._layout = CacheLayout(geometry, regions, {"layers.0": 0, "layers.1": 1}, is_written_early)

    connector.bind_connector_metadata(StepMetadata([BlocksReady(b"", 0, 0, [1], False, 32)]))
    layer_steps(connector, gpu, is_written_early=is_written_early)
    written = ["write {}", "event", "told {}"]
    expected = [*written, "attention"] if is_written_early else ["attention", *written]
    assert gpu.stream == [step.format(layer) for layer in range(NUM_LAYERS) for step in expected]

    gpu.stream.clear()
    connector.bind_connector_metadata(StepMetadata([BlocksReady(b"", 0, 0, [1], True, 32)]))
    layer_steps(connector, gpu, is_written_early=is_written_early)
    assert "event" not in gpu.stream, "a step that writes nothing announced records no event"


@pytest.mark.parametrize("asked", GRAPH_MODES)
def test_graphs_are_piecewise(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """In a full graph no hook runs, so vLLM must fall back to pieces; with its own connector it need not."""
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), head_size=32)
    assert graph_mode(model_dir, monkeypatch, asked, "layerwise") == (
        "NONE" if asked == "NONE" else "PIECEWISE"
    )
    assert graph_mode(model_dir, monkeypatch, asked, "nixl-pull") == asked


def graph_mode(model_dir: Path, monkeypatch: pytest.MonkeyPatch, asked: str, kv_connector: Any) -> str:
    """vLLM's, if it were on a GPU."""
    config = EngineConfig(
        str(model_dir),
        "tiny",
        kind="vllm",
        dtype="float32",
        threads=1,
        kv_connector=kv_connector,
        engine_args={"enforce_eager": "false", "compilation_config": f'{{"cudagraph_mode": "{asked}"}}'},
    )
    prepare_process(config)
    from vllm.platforms import current_platform

    from dynrt.engines.vllm.arguments import engine_arguments

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda self: True)
    monkeypatch.setattr(
        type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None)
    )
    made = engine_arguments(config, "link").create_engine_config()
    return str(made.compilation_config.cudagraph_mode.name)
