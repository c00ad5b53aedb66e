"""What the prefix index costs: look-ups, events and memory, alone and beside Dynamo's RadixTree."""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

import msgspec
from rig.index_sides import PEER_REQUIREMENT, Matches, OurIndex, PeerIndex, peer_python
from rig.index_workload import SharedPrompts, Step, trace_steps
from rig.report import Report, at_most, finish, new_report, spread

from dynrt.planner.traces import BLOCK_TOKENS, read_mooncake

BLOCK_SIZE = 16
LOOK_UP_BARS_US = {8: 20, 64: 35}
FROM_LIST_MORE_US = 25
EVENT_BAR_US = 8
MEMORY_BAR_BYTES = 60
PEER_LOOK_UP_SHARE = 0.75
PEER_REQUEST_SHARE = 0.5
PROMPTS_A_BATCH = 40
EVENTS_A_BATCH = 2000
STEPS_A_BATCH = 40
KINDS = {"to the end": 256, "system prompt": 64, "nothing": 0}  # what a look-up of 256 blocks finds
TRACE_WORKERS = (4, 8)
TRACE_BLOCKS_PER_WORKER = 5000
US = 1e6

T = TypeVar("T")


class Size(msgspec.Struct, frozen=True):
    """How much is done."""

    blocks: int
    batches: int  # of look-ups of each kind
    requests: int | None  # of each trace


FULL = Size(1_000_000, 25, None)
QUICK = Size(150_000, 8, 600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="coarser, within a minute")
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="in Mooncake's format; repeatable"
    )
    parser.add_argument("--no-peer", action="store_true", help="without Dynamo's index")
    arguments = parser.parse_args()
    gc.disable()  # nothing here makes cycles, and a collection would fall on some batch
    size = QUICK if arguments.quick else FULL
    report = new_report("index")
    peer = "not asked for" if arguments.no_peer else peer_python()
    if isinstance(peer, str):
        report.cases.append({"case": f"beside {PEER_REQUIREMENT}", "missing": peer})
    python = None if isinstance(peer, str) else peer
    for num_workers in LOOK_UP_BARS_US:
        _bench_shared_prompts(num_workers, size, python, report)
    _bench_memory(size, report)
    for path, num_workers in itertools.product(arguments.trace, TRACE_WORKERS):
        _bench_trace(path, num_workers, size, python, report)
    return finish(report, arguments.json)


def _bench_shared_prompts(num_workers: int, size: Size, python: Path | None, report: Report) -> None:
    workload = SharedPrompts(size.blocks, num_workers, BLOCK_SIZE, Random(7))
    ours = OurIndex(num_workers, BLOCK_SIZE)
    if python is None:
        _measure_shared_prompts(workload, ours, None, size, report)
        return
    with PeerIndex(python, BLOCK_SIZE) as peer:
        _measure_shared_prompts(workload, ours, peer, size, report)


def _measure_shared_prompts(
    workload: SharedPrompts, ours: OurIndex, peer: PeerIndex | None, size: Size, report: Report
) -> None:
    name = f"{workload.num_workers} workers"
    case: dict[str, object] = {"case": f"{workload.num_blocks} blocks, {name}"}
    event_us, peer_event_us = _store(workload, ours, peer)
    case["event_us"] = spread(event_us)
    if peer_event_us:
        case["peer_event_us"] = spread(peer_event_us)
    report.bars.append(
        at_most(f"event of 16 blocks, {name}", statistics.median(event_us), "µs", EVENT_BAR_US)
    )
    for kind, matching_blocks in KINDS.items():
        found = _look_up(workload, matching_blocks, ours, peer, size.batches)
        case |= {f"{kind}: {what}": spread(values) for what, values in found.items() if values}
        if matching_blocks == max(KINDS.values()):
            _add_look_up_bars(workload.num_workers, found, report)
    report.cases.append(case)


def _store(
    workload: SharedPrompts, ours: OurIndex, peer: PeerIndex | None
) -> tuple[list[float], list[float]]:
    """µs an event, in batches that take turns."""
    our_us: list[float] = []
    peer_us: list[float] = []
    for events in _batches(workload.events(), EVENTS_A_BATCH):
        our_us.append(US * ours.apply(events) / len(events))
        if peer is not None:
            peer_us.append(US * peer.apply(events) / len(events))
    return our_us, peer_us


def _look_up(
    workload: SharedPrompts, matching_blocks: int, ours: OurIndex, peer: PeerIndex | None, batches: int
) -> dict[str, list[float]]:
    """µs a look-up, in batches that take turns. The first warms up."""
    found: dict[str, list[float]] = {"packed_us": [], "from_list_us": [], "peer_us": [], "share": []}
    for number in range(batches + 1):
        prompts = workload.prompts(matching_blocks, PROMPTS_A_BATCH)
        packed_s, matches = ours.look_up_packed(prompts)
        list_s, matches_from_list = ours.look_up(prompts)
        _check(matches, matches_from_list, matching_blocks, workload.num_workers)
        peer_s = _peer_look_up(peer, prompts, matches)
        if number:
            found["packed_us"].append(US * packed_s / len(prompts))
            found["from_list_us"].append(US * list_s / len(prompts))
            if peer_s is not None:
                found["peer_us"].append(US * peer_s / len(prompts))
                found["share"].append(list_s / peer_s)
    return found


def _peer_look_up(peer: PeerIndex | None, prompts: Sequence[bytes], matches: Matches) -> float | None:
    if peer is None:
        return None
    cpu_s, peer_matches = peer.look_up(prompts)
    assert peer_matches == matches, "the indexes disagree"
    return cpu_s


def _check(matches: Matches, matches_from_list: Matches, matching_blocks: int, num_workers: int) -> None:
    assert matches == matches_from_list
    for match in matches:
        assert max(match.values(), default=0) == matching_blocks
        assert len(match) == (num_workers if matching_blocks else 0)


def _add_look_up_bars(num_workers: int, found: dict[str, list[float]], report: Report) -> None:
    name, bar_us = f"{num_workers} workers", LOOK_UP_BARS_US[num_workers]
    packed_us, list_us = statistics.median(found["packed_us"]), statistics.median(found["from_list_us"])
    report.bars.append(at_most(f"look-up from packed bytes, {name}", packed_us, "µs", bar_us))
    report.bars.append(
        at_most(f"look-up from a list of ids, {name}", list_us, "µs", bar_us + FROM_LIST_MORE_US)
    )
    if found["share"]:
        share = statistics.median(found["share"])
        report.bars.append(at_most(f"of the peer's CPU a look-up, {name}", share, "", PEER_LOOK_UP_SHARE))


def _bench_memory(size: Size, report: Report) -> None:
    """What is allocated beside the tokens, with the index's own estimate."""
    workload = SharedPrompts(size.blocks // 5, 8, BLOCK_SIZE, Random(7))
    messages = OurIndex(8, BLOCK_SIZE).messages(workload.events())
    tracemalloc.start()
    ours = OurIndex(8, BLOCK_SIZE)
    ours.take_in(messages)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    token_bytes = workload.num_blocks * BLOCK_SIZE * 4
    per_block = (allocated - token_bytes) / workload.num_blocks
    report.cases.append(
        {
            "case": f"memory, {workload.num_blocks} blocks, 8 workers",
            "bytes_a_block": per_block,
            "estimated_share": ours.index.num_bytes / allocated,
        }
    )
    report.bars.append(at_most("memory beside the tokens", per_block, "bytes a block", MEMORY_BAR_BYTES))


def _bench_trace(path: Path, num_workers: int, size: Size, python: Path | None, report: Report) -> None:
    requests = read_mooncake(path)[: size.requests]
    steps = trace_steps(requests, num_workers, TRACE_BLOCKS_PER_WORKER)
    ours = OurIndex(num_workers, BLOCK_TOKENS)
    name = f"{path.name}, {num_workers} workers"
    if python is None:
        costs = [_serve(batch, ours, None) for batch in _batches(steps, STEPS_A_BATCH)]
    else:
        with PeerIndex(python, BLOCK_TOKENS) as peer:
            costs = [_serve(batch, ours, peer) for batch in _batches(steps, STEPS_A_BATCH)]
    case: dict[str, object] = {"case": name, "requests": len(requests)}
    case |= {field: spread([getattr(cost, field) for cost in costs]) for field in _Cost._fields}
    if python is not None:
        _add_shares(_Cost(*map(sum, zip(*costs, strict=True))), name, case, report)
    report.cases.append(case)


class _Cost(NamedTuple):
    """µs of CPU a request, of one batch."""

    request_us: float  # from a list of ids
    packing_us: float  # the share of it that packs the list
    peer_request_us: float
    peer_event_hashing_us: float  # comes on top


def _serve(batch: list[Step], ours: OurIndex, peer: PeerIndex | None) -> _Cost:
    our_s, packing_s, our_matches = ours.serve(batch)
    peer_s = hashing_s = 0.0
    if peer is not None:
        peer_s, hashing_s, peer_matches = peer.serve(batch)
        assert our_matches == peer_matches, "the indexes disagree"
    return _Cost(*(US * cpu_s / len(batch) for cpu_s in (our_s, packing_s, peer_s, hashing_s)))


def _add_shares(total: _Cost, name: str, case: dict[str, object], report: Report) -> None:
    """Both sides start from token ids, of prompts as of stored blocks: ours come packed, as engines send them."""
    peer_us = total.peer_request_us + total.peer_event_hashing_us
    case["share_if_its_events_came_hashed"] = total.request_us / total.peer_request_us
    case["share_from_packed_prompts"] = (total.request_us - total.packing_us) / total.peer_request_us
    share = total.request_us / peer_us
    report.bars.append(at_most(f"of the peer's CPU a request, {name}", share, "", PEER_REQUEST_SHARE))


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


if __name__ == "__main__":
    sys.exit(main())
