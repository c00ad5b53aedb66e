"""How much of the KV transfer hides behind prefill: layer by layer against everything sent after prefill."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
from rig.engine_pair import EnginePair, Mode, Run
from rig.report import Report, Spread, at_least, finish, new_report, spread

from dynrt.engines.config import EngineConfig
from dynrt.runtime.errors import DynrtError
from dynrt.runtime.model import find_model
from dynrt.transfer.trace import TraceEvent

MODES: tuple[Mode, ...] = ("layerwise", "whole", "off")
VOCABULARY = 30_000  # prompts are random ids below this: no two share a prefix
MS = 1e3


class Case(msgspec.Struct, frozen=True):
    """One prompt length computed in chunks of so many tokens."""

    prompt_tokens: int
    chunk_tokens: int


class Layers(msgspec.Struct, frozen=True):
    """A layer's times in ms, medians over the last chunk of the runs without a push (t: of the layerwise ones).

    c: compute of a layer. a: when in a layer its KV is written. h: the head's time. t: transfer of a layer.
    """

    c: float
    a: float
    h: float
    t: float
    num_layers: int

    @property
    def bound_ms(self) -> float:
        """No implementation's exposed time can be below: max(0, t-(c-a)-h, a + L·t - L·c - h)."""
        one_left = self.t - (self.c - self.a) - self.h
        link_full = self.a + self.num_layers * (self.t - self.c) - self.h
        return max(0.0, one_left, link_full)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="coarser, within a minute")
    parser.add_argument("--model", help="as for `dynrt serve` (default: smollm2-135m)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--runs", type=int, help="runs of each mode (default: 30; quick: 5)")
    arguments = parser.parse_args()
    try:
        return asyncio.run(_bench(arguments))
    except DynrtError as error:
        print(f"overlap: {error.message}", file=sys.stderr)
        return 2


async def _bench(arguments: argparse.Namespace) -> int:
    report = new_report("overlap")
    model = await find_model(arguments.model)
    runs = arguments.runs or (5 if arguments.quick else 30)
    cases = [Case(512, 512)] if arguments.quick else [Case(2000, 512), Case(2000, 2048)]
    for case in cases:
        config = EngineConfig(
            model.path, model.name, dtype=arguments.dtype, threads=1, max_batch_tokens=case.chunk_tokens
        )
        with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as directory:
            await _measure(config, Path(directory), case, runs, report)
    return finish(report, arguments.json)


async def _measure(config: EngineConfig, directory: Path, case: Case, runs: int, report: Report) -> None:
    pair = EnginePair(config, directory)
    async with pair:
        by_mode, right = await _interleave(pair, case, runs)
    trace = pair.trace("prefill")
    layers = _layers(trace, by_mode)
    exposed_ms = {mode: [MS * run.exposed_s for run in by_mode[mode]] for mode in ("layerwise", "whole")}
    hidden = 1.0 - statistics.median(exposed_ms["layerwise"]) / statistics.median(exposed_ms["whole"])
    report.cases.append(
        {
            "prompt_tokens": case.prompt_tokens,
            "chunk_tokens": case.chunk_tokens,
            "kv_megabytes": by_mode["whole"][0].kv_bytes / 1e6,
            "exposed_layerwise_ms": spread(exposed_ms["layerwise"]),
            "exposed_whole_ms": spread(exposed_ms["whole"]),
            "bound_ms": layers.bound_ms,
            "hidden_share": hidden,
            "prefill_off_ms": _prefill_ms(by_mode["off"]),
            "prefill_layerwise_ms": _prefill_ms(by_mode["layerwise"]),
            "layer_compute_c_ms": layers.c,
            "kv_written_a_ms": layers.a,
            "head_h_ms": layers.h,
            "layer_transfer_t_ms": layers.t,
            "num_layers": layers.num_layers,
        }
    )
    name = f"{case.prompt_tokens} tokens in chunks of {case.chunk_tokens}"
    report.bars.append(at_least(f"share hidden, {name}", 100 * hidden, "%", 90))
    report.bars.append(at_least(f"runs that decode as prefill itself would, {name}", 100 * right, "%", 90))


async def _interleave(pair: EnginePair, case: Case, runs: int) -> tuple[dict[Mode, list[Run]], float]:
    """The runs of each mode, and the share of handoffs behind which decode went on as prefill would have.

    Modes take turns, so that a slow minute of the machine falls on all alike. The first round warms up.
    """
    prompts = random.Random(1)
    by_mode: dict[Mode, list[Run]] = {mode: [] for mode in MODES}
    right: list[bool] = []
    for number in range(runs + 1):
        for mode in MODES:
            prompt_ids = [prompts.randrange(VOCABULARY) for _ in range(case.prompt_tokens)]
            run = await pair.run(prompt_ids, mode)
            if mode != "off":
                expected = await pair.continuation(prompt_ids, run.token_ids[0])
                right.append(run.token_ids[1:] == expected)
            if number:
                by_mode[mode].append(run)
    return by_mode, sum(right) / len(right)


def _prefill_ms(runs: list[Run]) -> Spread:
    return spread([MS * (run.sampled_at - run.submitted_at) for run in runs])


def _layers(trace: list[TraceEvent], by_mode: dict[Mode, list[Run]]) -> Layers:
    last_chunks = [_last_chunk(trace, run) for run in by_mode["off"]]
    num_layers = 1 + max(event.first_layer for event in trace if event.kind == "written")
    compute, writing, head = [], [], []
    for run, (began_at, *written_at) in zip(by_mode["off"], last_chunks, strict=True):
        assert len(written_at) == num_layers, f"{len(written_at)} of {num_layers} layers written"
        c = (written_at[-1] - written_at[0]) / (num_layers - 1)
        a = min(c, written_at[0] - began_at)
        compute.append(MS * c)
        writing.append(MS * a)
        head.append(MS * max(0.0, run.sampled_at - written_at[-1] - (c - a)))
    return Layers(
        c=statistics.median(compute),
        a=statistics.median(writing),
        h=statistics.median(head),
        t=statistics.median(_layer_transfers_ms(trace, by_mode["layerwise"])),
        num_layers=num_layers,
    )


def _last_chunk(trace: list[TraceEvent], run: Run) -> list[float]:
    """When the last step of this run began, and when each of its layers was written."""
    own = [event for event in trace if run.submitted_at <= event.at <= run.sampled_at]
    last_step = max(index for index, event in enumerate(own) if event.kind == "step")
    return [event.at for event in own[last_step:] if event.kind in ("step", "written")]


def _layer_transfers_ms(trace: list[TraceEvent], runs: list[Run]) -> list[float]:
    keys = {run.key for run in runs}
    posted: dict[tuple[str, int, int], float] = {}
    transfers = []
    for event in trace:
        write = event.key, event.first_layer, event.num_blocks
        if event.kind == "posted" and event.key in keys:
            posted[write] = event.at
        elif event.kind == "done" and event.key in keys:
            transfers.append(MS * (event.at - posted.pop(write)) / event.num_layers)
    return transfers


if __name__ == "__main__":
    sys.exit(main())
