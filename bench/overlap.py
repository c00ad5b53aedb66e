"""How much of the KV transfer hides behind prefill: layer by layer against everything sent after prefill."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import msgspec
import uvloop
from rig.engine_pair import EnginePair, Mode, Run
from rig.overlap_cases import MEDIUM, Case, link_cases, model_cases
from rig.pipeline import Layers, layers_of, rate_of, thread_cpu_s, writes_of
from rig.random_model import write_random_model
from rig.report import Report, at_least, at_most, finish, new_report, spread
from rig.vllm_own_messages import Connector
from rig.vllm_own_pair import OwnPair, OwnRun

from dynrt.engines.config import EngineConfig
from dynrt.runtime.errors import ConfigError, DynrtError
from dynrt.runtime.model import find_model
from dynrt.runtime.offload import InlineOffload
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.throttle import LinkSpeed
from dynrt.transfer.trace import TraceEvent

MODES: tuple[Mode, ...] = ("layerwise", "whole", "off")
VOCABULARY = 250  # prompts are random ids from 5 up to this; no two share a prefix
MS = 1e3
OFF_EVERY = 3
MAX_EXCESS_MS = 1.5  # over the bound
MAX_EXCESS_SHARE = 0.10  # or this part of it, on slow links
MAX_LATE_SHARE = 0.02  # how much later decode's first own token may come than with whole-send
MAX_CPU_SHARE = 0.03
VLLM_KV_BYTES = 256_000_000  # as there are four engines beside each other


class Measured(msgspec.Struct, frozen=True):
    """The runs of one case by mode, and what their traces say."""

    by_mode: dict[Mode, list[Run]]
    own: list[OwnRun]  # of the same prompts, by vLLM's own connector
    layers: dict[str, Layers]  # by run
    right: float  # share of handoffs behind which decode went on as prefill, or vLLM's own pair, would have
    rate: float  # bytes per second of the link
    cpu_share: float  # transfer thread's CPU of a push over the process's CPU of a prefill

    def exposed_ms(self, mode: Mode) -> list[float]:
        return [MS * run.exposed_s for run in self.by_mode[mode]]

    def bounds_ms(self) -> list[float]:
        return [MS * self.layers[run.key].bound_s(self.rate) for run in self.by_mode["layerwise"]]

    def first_decode_s(self, mode: Mode) -> list[float]:
        return [run.first_decode_s for run in self.by_mode[mode]]

    def prefill_s(self, mode: Mode) -> float:
        return statistics.median(run.sampled_at - run.submitted_at for run in self.by_mode[mode])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="coarser, within a minute")
    parser.add_argument("--model", help="as for `dynrt serve` (default: smollm2-135m)")
    parser.add_argument(
        "--links",
        action="store_true",
        help="random models with other prompt lengths, over TCP and slow links too: many minutes",
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--engine", default="native", choices=("native", "vllm"))
    parser.add_argument(
        "--own-connector",
        default="NixlPushConnector",
        choices=get_args(Connector),
        help="of vLLM's, measured beside --engine vllm (default: NixlPushConnector)",
    )
    parser.add_argument("--runs", type=int, metavar="N", help="of each case (default: 30, or fewer if slow)")
    arguments = parser.parse_args()
    try:
        _check(arguments)
        return uvloop.run(_bench(arguments))  # as the runtime does
    except DynrtError as error:
        print(f"overlap: {error.message}", file=sys.stderr)
        return 2


def _check(arguments: argparse.Namespace) -> None:
    if arguments.engine == "vllm" and arguments.links:
        raise ConfigError("--links has random models for --engine native; leave one of them out")
    if arguments.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is missing: {sys.executable} does not have it; `bin/bench overlap --engine vllm` runs where it is"
        )


async def _bench(arguments: argparse.Namespace) -> int:
    report = new_report("overlap")
    cases = _cases(arguments)
    prefill_s: dict[tuple[Any, ...], float] = {}  # without a push
    with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as directory:
        for number, case in enumerate(cases):
            if arguments.runs is not None:
                case = msgspec.structs.replace(case, runs=arguments.runs)
            config = await _config(case, arguments, Path(directory))
            shape = case.tokens, case.chunk, case.model
            if case.ratio:
                config = _throttled(config, case, prefill_s[shape])
            if case.link == "tcp":
                config = msgspec.structs.replace(config, transfer=TransferOptions(ucx={"UCX_TLS": "tcp"}))
            traces = tempfile.mkdtemp(dir=directory)
            own = OwnPair(config, arguments.own_connector) if arguments.engine == "vllm" else None
            measured = await _measure(config, Path(traces), case, own)
            prefill_s.setdefault(shape, measured.prefill_s("off"))
            _report(case, measured, report)
            print(f"overlap: {number + 1} of {len(cases)}: {report.cases[-1]}", file=sys.stderr, flush=True)
    return finish(report, arguments.json)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.links:
        return link_cases(quick=arguments.quick)
    return model_cases(quick=arguments.quick, engine=arguments.engine)


async def _config(case: Case, arguments: argparse.Namespace, directory: Path) -> EngineConfig:
    if case.model is None:
        model = await find_model(arguments.model, InlineOffload())
        config = EngineConfig(
            model.path, model.name, dtype=arguments.dtype, threads=1, max_batch_tokens=case.chunk
        )
        return _for_vllm(config) if arguments.engine == "vllm" else config
    path = write_random_model(directory, *case.model)
    return EngineConfig(
        str(path), "random", dtype="float32", threads=1, max_batch_tokens=case.chunk, kv_blocks=512
    )


def _for_vllm(config: EngineConfig) -> EngineConfig:
    arguments = {"kv_cache_memory_bytes": str(VLLM_KV_BYTES), "max_model_len": "4096"}
    return msgspec.structs.replace(config, kind="vllm", engine_args=arguments)


def _throttled(config: EngineConfig, case: Case, prefill_s: float) -> EngineConfig:
    """A link over which the whole KV takes `ratio` times as long as its prefill."""
    assert case.model is not None
    num_layers = case.model[1]
    num_bytes = case.tokens * num_layers * 2 * 2 * 32 * 4
    link = LinkSpeed(num_bytes / (case.ratio * prefill_s))
    return msgspec.structs.replace(config, transfer=TransferOptions(throttle=link))


async def _measure(config: EngineConfig, directory: Path, case: Case, own: OwnPair | None) -> Measured:
    pair = EnginePair(config, directory)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pair)
        if own is not None:
            await stack.enter_async_context(own)
        by_mode, own_runs, right = await _interleave(pair, case, own)
    trace = pair.trace("prefill")
    block_bytes = pair.layer_block_bytes
    handed = [*by_mode["layerwise"], *by_mode["whole"]]
    layers = {run.key: layers_of(trace, run, block_bytes) for run in [*handed, *by_mode["off"]]}
    throttle = config.transfer.throttle
    rate = _rate(trace, by_mode["whole"], block_bytes) if throttle is None else throttle.bytes_per_s
    return Measured(by_mode, own_runs, layers, right, rate, _cpu_share(trace, by_mode))


async def _interleave(
    pair: EnginePair, case: Case, own: OwnPair | None
) -> tuple[dict[Mode, list[Run]], list[OwnRun], float]:
    """The runs of each mode, those of vLLM's own pair, and the share of handoffs behind which decode went on right.

    Modes take turns, so that a slow minute of the machine falls on all alike. The first round warms up. Nothing is
    handed off in every third round only: what that shows varies little.
    """
    prompts = random.Random(1)
    by_mode: dict[Mode, list[Run]] = {mode: [] for mode in MODES}
    own_runs: list[OwnRun] = []
    right: list[bool] = []
    for number in range(case.runs + 1):
        for mode in MODES if number % OFF_EVERY == 1 else MODES[:2]:
            prompt_ids = [prompts.randrange(5, VOCABULARY) for _ in range(case.tokens)]
            run = await pair.run(prompt_ids, mode)
            if number:
                by_mode[mode].append(run)
            if mode == "off":
                continue
            if own is None:
                expected = await pair.continuation(prompt_ids, run.token_ids[0])
                right.append(run.token_ids[1:] == expected)
            else:  # its decode computes in the very same steps, so that bfloat16 rounds alike
                own_runs.append(await own.run(prompt_ids))
                right.append(run.token_ids == own_runs[-1].token_ids)
    return by_mode, own_runs[2:], sum(right) / len(right)


def _rate(trace: Sequence[TraceEvent], runs: Sequence[Run], block_bytes: int) -> float:
    """Of whole-sends, whose few writes cost next to nothing beside their bytes."""
    return statistics.median(rate_of(writes_of(trace, run, block_bytes)) for run in runs)


def _cpu_share(trace: Sequence[TraceEvent], by_mode: dict[Mode, list[Run]]) -> float:
    push_s = statistics.median(thread_cpu_s(trace, run) for run in by_mode["layerwise"])
    return push_s / statistics.median(run.prefill_cpu_s for run in by_mode["off"])


def _report(case: Case, measured: Measured, report: Report) -> None:
    exposed, whole, bounds = (
        measured.exposed_ms("layerwise"),
        measured.exposed_ms("whole"),
        measured.bounds_ms(),
    )
    off = [measured.layers[run.key] for run in measured.by_mode["off"]]
    excess = [ms - bound for ms, bound in zip(exposed, bounds, strict=True)]
    hidden = 1.0 - statistics.median(exposed) / statistics.median(whole)
    late = _late(measured)
    report.cases.append(
        {
            "case": case.name,
            "model": "real" if case.model is None else f"random {case.model[0]}x{case.model[1]}",
            "exposed_layerwise_ms": spread(exposed),
            "exposed_whole_ms": spread(whole),
            "bound_ms": spread(bounds),
            "bound_off_ms": spread([MS * layers.bound_s(measured.rate) for layers in off]),
            "excess_ms": spread(excess),
            "hidden_share": hidden,
            "decode_wait_ms": spread([MS * run.decode_wait_s for run in measured.by_mode["layerwise"]]),
            "first_decode_layerwise_ms": spread([MS * s for s in measured.first_decode_s("layerwise")]),
            "first_decode_whole_ms": spread([MS * s for s in measured.first_decode_s("whole")]),
            "first_decode_late_share": late,
            "prefill_off_ms": MS * measured.prefill_s("off"),
            "prefill_layerwise_ms": MS * measured.prefill_s("layerwise"),
            "layer_compute_c_ms": MS * statistics.median(layers.c for layers in off),
            "kv_written_a_ms": MS * statistics.median(layers.a for layers in off),
            "head_h_ms": MS * statistics.median(layers.h for layers in off),
            "link_megabytes_per_s": measured.rate / 1e6,
            "push_cpu_share": measured.cpu_share,
            "kv_megabytes": measured.by_mode["whole"][0].kv_bytes / 1e6,
            **_own_columns(measured.own),
        }
    )
    _add_bars(case, measured, excess, hidden, late, report)


def _own_columns(runs: Sequence[OwnRun]) -> dict[str, Any]:
    """vLLM's own connector; nothing where it was not measured."""
    if not runs:
        return {}
    return {
        "vllm_own_connector": runs[0].connector,
        "exposed_vllm_own_ms": spread([MS * run.exposed_s for run in runs]),
        "decode_wait_vllm_own_ms": spread([MS * run.decode_wait_s for run in runs]),
    }


def _late(measured: Measured) -> float:
    """How much later decode's own first token came than with whole-send in the same round, as a share of that."""
    rounds = zip(measured.first_decode_s("layerwise"), measured.first_decode_s("whole"), strict=True)
    return statistics.median(layerwise / whole for layerwise, whole in rounds) - 1


def _add_bars(
    case: Case, measured: Measured, excess: list[float], hidden: float, late: float, report: Report
) -> None:
    bars, name = report.bars, case.name
    limit_ms = MAX_EXCESS_MS
    if case.ratio:
        limit_ms = max(limit_ms, MAX_EXCESS_SHARE * statistics.median(measured.bounds_ms()))
    if case.link != "tcp":
        bars.append(at_most(f"exposed over the bound, {name}", statistics.median(excess), "ms", limit_ms))
    if case.model in (None, MEDIUM):
        bars.append(at_least(f"share hidden, {name}", 100 * hidden, "%", 97 if case.ratio else 90))
    if case.model is None:
        bars.append(at_most(f"CPU of the push, {name}", 100 * measured.cpu_share, "%", 100 * MAX_CPU_SHARE))
    bars.append(at_most(f"first decode later, {name}", 100 * late, "%", 100 * MAX_LATE_SHARE))
    bars.append(at_least(f"runs that decode as they should, {name}", 100 * measured.right, "%", 90))


if __name__ == "__main__":
    sys.exit(main())
