"""How much of the attainable prefix hits the planner's choice gets, and what requests wait, on recorded traces."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rig.planner_rule import PlannerRule
from rig.prefill_fleet import FleetShape, PrefillFleet, Rule
from rig.report import Bar, Report, at_least, at_most, finish, new_report
from rig.routing_outcome import Outcome, oracle_hit_share, summarize
from rig.routing_rules import OTHER_RULES
from rig.shared_prefix import SharedPrefix, serve_shared_prefix

from dynrt.planner.cost import UNCACHED_EXTRA
from dynrt.planner.traces import (
    CONVERSATION_TICK_S,
    TraceRequest,
    compress_arrivals,
    read_mooncake,
    spread_arrivals,
)

OURS = "dynrt"
RECORDED_WORKERS = 4  # the fleet that a trace's own pace suits; larger ones get it as many times faster
LOADS = (0.6, 1.0, 1.33)  # of the trace's own pace
MIDDLE_BLOCKS = 5_000
LEAST_HITS = {25_000: 96.0, 5_000: 96.0, 2_000: 95.0}  # % of the oracle's, by blocks of a worker
EXTRAS = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0)  # k of the sweep
TIMES = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")


class Trace(msgspec.Struct, frozen=True):
    """A file, and how coarse its times of arrival are."""

    path: Path
    tick_s: float


class Case(msgspec.Struct, frozen=True):
    """What all rules are compared on."""

    trace: Trace
    num_workers: int
    blocks_per_worker: int
    load: float = 1.0

    @property
    def shape(self) -> FleetShape:
        return FleetShape(self.num_workers, self.blocks_per_worker)


class Contender(msgspec.Struct, frozen=True):
    rule: str
    uncached_extra: float = UNCACHED_EXTRA  # of dynrt's planner only


CONTENDERS = [Contender(rule) for rule in (OURS, *OTHER_RULES)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trace", type=Path, required=True, help="Mooncake's conversation trace (JSON lines)"
    )
    parser.add_argument("--synthetic", type=Path, help="Mooncake's synthetic trace, to be reported beside it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one seed, 4 workers, conversation only")
    parser.add_argument(
        "--sweep", action="store_true", help="compare values of the planner's k instead of rules"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of arrivals and ties (default: 5)")
    arguments = parser.parse_args()
    traces = [Trace(arguments.trace, CONVERSATION_TICK_S)]
    if arguments.synthetic is not None:
        traces.append(Trace(arguments.synthetic, 0.0))
    try:
        for trace in traces:
            _requests(trace)
    except (OSError, ValueError) as error:
        print(f"routing: {trace.path}: {error}", file=sys.stderr)
        return 2
    seeds = range(1, 1 + (1 if arguments.quick else arguments.seeds))
    report = new_report("routing")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if arguments.sweep:
            _sweep(pool, traces, seeds[:3], report)
        else:
            _hold_to_bars(pool, traces[0], seeds, report)
            if not arguments.quick:
                _report_the_rest(pool, traces, seeds[:1], report)
            _hold_simple_claim(report)
    return finish(report, arguments.json)


def _hold_to_bars(
    pool: ProcessPoolExecutor, conversation: Trace, seeds: Sequence[int], report: Report
) -> None:
    """Every rule, on the fleet that the conversation trace was first replayed on."""
    cases = [Case(conversation, RECORDED_WORKERS, blocks) for blocks in LEAST_HITS]
    for case, rows in _run(pool, cases, CONTENDERS, seeds):
        report.cases += rows
        report.bars += _bars(case, rows)


def _report_the_rest(
    pool: ProcessPoolExecutor, traces: Sequence[Trace], seeds: Sequence[int], report: Report
) -> None:
    """Every rule on larger fleets, other loads and the other trace; no bar."""
    cases = [
        Case(trace, num_workers, MIDDLE_BLOCKS, load)
        for trace, num_workers, load in product(traces, (4, 8, 16), LOADS)
        if (trace, num_workers, load) != (traces[0], RECORDED_WORKERS, 1.0)
    ]
    for _, rows in _run(pool, cases, CONTENDERS, seeds):
        report.cases += rows


def _hold_simple_claim(report: Report) -> None:
    served = serve_shared_prefix(SharedPrefix())
    report.cases.append(msgspec.structs.asdict(served))
    name = "tokens saved by each request behind the first of its worker"
    report.bars.append(at_least(name, served.saved_warm, "%", 24.8))


def _sweep(pool: ProcessPoolExecutor, traces: Sequence[Trace], seeds: Sequence[int], report: Report) -> None:
    contenders = [Contender(OURS, extra) for extra in EXTRAS]
    cases = [Case(trace, RECORDED_WORKERS, MIDDLE_BLOCKS, load) for trace, load in product(traces, LOADS)]
    for _, rows in _run(pool, cases, contenders, seeds):
        report.cases += rows


def _run(
    pool: ProcessPoolExecutor,
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    seeds: Sequence[int],
) -> Iterator[tuple[Case, list[dict[str, Any]]]]:
    """Each case with a row per contender: the medians of all seeds."""
    tasks = list(product(cases, contenders, seeds))
    outcomes = pool.map(_serve, *zip(*tasks, strict=True))
    for case in cases:
        hits = oracle_hit_share(_requests(case.trace), case.num_workers * case.blocks_per_worker)
        rows = []
        for contender in contenders:
            of_seeds = [next(outcomes) for _ in seeds]
            rows.append(_row(case, contender, hits, of_seeds))
        yield case, rows


def _serve(case: Case, contender: Contender, seed: int) -> Outcome:
    random = Random(seed)
    requests = spread_arrivals(_requests(case.trace), case.trace.tick_s, random)
    pace = case.load * case.num_workers / RECORDED_WORKERS
    fleet = PrefillFleet(case.shape)
    rule: Rule
    if contender.rule == OURS:
        rule = PlannerRule(case.shape, random, uncached_extra=contender.uncached_extra)
    else:
        rule = OTHER_RULES[contender.rule](fleet.caches, random)
    return summarize(fleet.run(compress_arrivals(requests, pace), rule), case.shape)


@lru_cache(maxsize=2)
def _requests(trace: Trace) -> list[TraceRequest]:
    return read_mooncake(trace.path)


def _row(case: Case, contender: Contender, oracle_hits: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    medians = {
        name: statistics.median(getattr(outcome, name) for outcome in outcomes)
        for name in Outcome.__struct_fields__
    }
    return {
        "trace": case.trace.path.stem,
        "workers": case.num_workers,
        "blocks_per_worker": case.blocks_per_worker,
        "load": case.load,
        "rule": contender.rule,
        **({"k": contender.uncached_extra} if contender.rule == OURS else {}),
        "seeds": len(outcomes),
        "hits_of_oracle": medians["hit_share"] / oracle_hits,
        **medians,
    }


def _bars(case: Case, rows: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    ours = next(row for row in rows if row["rule"] == OURS)
    others = [row for row in rows if row["rule"] != OURS]
    where = f"{case.blocks_per_worker} blocks"
    hits = 100 * ours["hits_of_oracle"]
    yield at_least(f"oracle's hits, {where}", hits, "%", LEAST_HITS[case.blocks_per_worker])
    yield at_most(f"requests max/mean, {where}", ours["requests_max_over_mean"], "", 1.10)
    for name in TIMES:
        best = min(row[name] for row in others)
        yield at_most(f"{name} of the best other rule's, {where}", 100 * ours[name] / best, "%", 103)


if __name__ == "__main__":
    sys.exit(main())
