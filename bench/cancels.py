"""Requests cancelled at any moment leave nothing behind: no block, no handoff, no memory, no wrong KV."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
from rig.live_runtime import config, counter, greedy, is_clean, seconds_until
from rig.report import at_least, at_most, finish, new_report

from dynrt.runtime import Runtime
from dynrt.runtime.errors import DynrtError
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.throttle import LinkSpeed

CONCURRENT = 24
HANG_S = 60.0
CLEAN_S = 30.0
LONGEST_PROMPT = 700
LATEST_CANCEL_S = 0.6  # most requests would take longer than this, so that all states are met
LINK = LinkSpeed(bytes_per_s=40e6, latency_s=0.5e-3)
RSS_GROWTH_LIMIT, QUICK_RSS_GROWTH_LIMIT = 0.05, 0.10  # a short run has a short warm-up


class Tally(msgspec.Struct):
    """How the requests ended."""

    cancelled: int = 0
    finished: int = 0
    hung: int = 0
    errors: Counter[str] = msgspec.field(default_factory=Counter)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="coarser, within a minute")
    parser.add_argument("--cancels", type=int, help="how many (default: 10,000; quick: 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and prompts (default: 1)")
    arguments = parser.parse_args()
    return asyncio.run(_bench(arguments))


async def _bench(arguments: argparse.Namespace) -> int:
    report = new_report("cancels")
    wanted = arguments.cancels or (300 if arguments.quick else 10_000)
    with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as directory:
        transfer = TransferOptions(verify=True, throttle=LINK)
        async with Runtime(config(Path(directory), transfer=transfer)) as runtime:
            random = Random(arguments.seed)
            warm = await _cancel_many(
                runtime, max(100, wanted // 5), random
            )  # memory grows to its working size
            before = await _rss(runtime)
            tally = await _cancel_many(runtime, wanted, random)
            clean_s = await seconds_until(lambda: is_clean(runtime), CLEAN_S)
            after = await _rss(runtime)
            statuses = await runtime.status()
            mismatches = counter(runtime, 'dynrt_handoff_failures_total{reason="checksum"}')
            outcomes = {
                outcome: counter(runtime, f'dynrt_handoffs_total{{outcome="{outcome}"}}')
                for outcome in ("committed", "cancelled", "fenced", "failed")
            }
    growth = {worker: after[worker] / before[worker] - 1 for worker in before}
    report.cases.append(
        {
            "cancels": tally.cancelled,
            "finished": tally.finished,
            "warm_up_cancels": warm.cancelled,
            "errors": dict(tally.errors),
            "handoffs": outcomes,
            "clean_after_s": clean_s,
            "rss_megabytes": {worker: rss / 1e6 for worker, rss in after.items()},
            "rss_growth": growth,
        }
    )
    growth_limit = QUICK_RSS_GROWTH_LIMIT if arguments.quick else RSS_GROWTH_LIMIT
    leaked = sum(status.load.blocks_active for status in statuses.values())
    open_handoffs = sum(status.open_handoffs for status in statuses.values())
    report.bars += [
        at_least("requests cancelled", tally.cancelled, "", wanted),
        at_most("leaked blocks", leaked, "", 0),
        at_most("handoffs left open", open_handoffs, "", 0),
        at_most("mismatching checksums", mismatches, "", 0),
        at_most("hung requests", tally.hung, "", 0),
        at_most("requests that failed", sum(tally.errors.values()), "", 0),
        at_most("growth of the largest process", 100 * max(growth.values()), "%", 100 * growth_limit),
    ]
    return finish(report, arguments.json)


async def _cancel_many(runtime: Runtime, wanted: int, random: Random) -> Tally:
    """Until so many were cancelled; those that finish before their moment count apart."""
    tally = Tally()

    async def client() -> None:
        while tally.cancelled < wanted:
            await _one(runtime, random, tally)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENT):
            group.create_task(client())
    return tally


async def _one(runtime: Runtime, random: Random, tally: Tally) -> None:
    request = greedy(random.randint(1, LONGEST_PROMPT), random.randint(1, 40), random)

    async def read() -> None:
        async for _ in runtime.generate(request):
            pass

    task = asyncio.create_task(read())
    await asyncio.wait([task], timeout=random.random() ** 2 * LATEST_CANCEL_S)
    was_done = task.done()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=HANG_S)
    if not done:
        tally.hung += 1
    elif not was_done:
        tally.cancelled += 1
    else:
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            tally.finished += error is None
            if isinstance(error, DynrtError):
                tally.errors[error.message] += 1
            elif error is not None:
                raise error


async def _rss(runtime: Runtime) -> dict[str, int]:
    """Resident bytes of every process."""
    workers = {worker: status.rss_bytes for worker, status in (await runtime.status()).items()}
    return {"runtime": _own_rss(), **workers}


def _own_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    sys.exit(main())
