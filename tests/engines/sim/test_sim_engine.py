"""SimEngine on the real clock: what its layer hook is told, and when it lets layers go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from virtual_engine import BLOCK_SIZE, PROFILE, expected_outputs, make_request, outputs, sim_config

from dynrt.engines.config import SimConfig
from dynrt.engines.protocol import Token
from dynrt.engines.sim.engine import Crossing, SimEngine
from dynrt.engines.sim.link import Link
from dynrt.transfer.local import BlocksReady

PROMPT = [10 + (7 * i * i) % 280 for i in range(14)]
SLOW_LINK = Link(bytes_per_s=1e5, send_s=1e-3)  # a block of 4 KiB in one layer takes 41 ms


class Recorder:
    """A LayerHook that keeps what it was told, and when."""

    def __init__(self) -> None:
        self.ready: list[BlocksReady] = []
        self.crossings: list[Crossing] = []
        self.told_at: list[float] = []
        self.layers: list[int] = []

    def step_begins(self, ready: list[BlocksReady]) -> None:
        self.ready += ready

    def layer_written(self, layer: int, event: object | None) -> None:
        assert isinstance(event, Crossing)
        self.told_at.append(time.monotonic())
        self.layers.append(layer)
        self.crossings.append(event)


@pytest.fixture
def engine(config_dir: Path, tmp_path: Path) -> Iterator[SimEngine]:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, link=SLOW_LINK)))
    engine = SimEngine(msgspec.structs.replace(sim_config(config_dir), sim=SimConfig(profile=str(path))))
    yield engine
    engine.close()


def run(engine: SimEngine, hook: Recorder) -> list[Token]:
    tokens: list[Token] = []
    while engine.has_work():
        tokens += engine.step(hook).tokens
    return tokens


def test_a_request_takes_no_less_time_than_its_steps(engine: SimEngine) -> None:
    hook, request = Recorder(), make_request(1, PROMPT, 4)
    engine.submit(request)
    began_at = time.monotonic()
    assert outputs(run(engine, hook), request) == expected_outputs(PROMPT, 4)
    assert time.monotonic() - began_at >= 6.4e-3 + 3 * 5.5e-3
    assert hook.layers == [] and hook.ready == []


def test_layers_of_a_handoff_are_told_during_the_step(engine: SimEngine) -> None:
    hook, request = Recorder(), make_request(1, PROMPT, 4, prefill_only=True)
    engine.submit(request)
    began_at = time.monotonic()
    run(engine, hook)
    assert hook.layers == [0, 1, 2]
    assert [blocks.written for blocks in hook.ready] == [False]
    due = [began_at + 6.4e-3 * (layer + 0.1) / 3 for layer in range(3)]
    assert all(told_at >= at for told_at, at in zip(hook.told_at, due, strict=True))


def test_layers_cross_the_link_one_after_the_other(engine: SimEngine) -> None:
    hook = Recorder()
    engine.submit(make_request(1, PROMPT, 4, prefill_only=True))
    run(engine, hook)
    crossing_s = SLOW_LINK.transfer_s(4 * BLOCK_SIZE * (1 << 10))  # 4 blocks, 1 KiB a token and layer
    ends = [crossing.ends_at for crossing in hook.crossings]
    assert ends[0] >= hook.told_at[0] + 0.9 * crossing_s
    assert [ends[1] - ends[0], ends[2] - ends[1]] == pytest.approx([crossing_s, crossing_s])


def test_a_layer_may_go_once_it_has_crossed() -> None:
    assert Crossing(time.monotonic()).query()
    assert not Crossing(time.monotonic() + 3600).query()


def test_a_prefix_hit_crosses_before_the_layers_do(engine: SimEngine) -> None:
    hook = Recorder()
    engine.submit(make_request(1, PROMPT, 1))
    run(engine, hook)
    engine.submit(make_request(2, PROMPT, 4, prefill_only=True))
    began_at = time.monotonic()
    run(engine, hook)
    assert [(blocks.written, len(blocks.block_ids)) for blocks in hook.ready] == [(True, 3), (False, 1)]
    hit_s = SLOW_LINK.transfer_s(3 * 3 * BLOCK_SIZE * (1 << 10))
    layer_s = SLOW_LINK.transfer_s(BLOCK_SIZE * (1 << 10))
    assert hook.crossings[0].ends_at - began_at >= hit_s + layer_s
    assert hook.crossings[2].ends_at - hook.crossings[1].ends_at == pytest.approx(layer_s)
