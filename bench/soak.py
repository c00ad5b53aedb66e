"""The endpoint under many connections, many requests and a huge prompt: memory stays flat, streams go on evenly."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop
from rig.http_load import Load, Outcome
from rig.open_connections import GET_LIVE, Connection, open_many, post_chat
from rig.random_model import write_random_model
from rig.report import Report, at_least, at_most, finish, new_report, spread
from rig.serve_command import ServeCommand, serving_sim

from dynrt.runtime.open_files import allow_many

HTTP_LOAD = Path(__file__).with_name("rig") / "http_load.py"
OPEN_S = 120.0
ANSWER_S = 30.0
IDLE_S = 10.0  # well below the server's limit for idle connections, 75 s
SHORT_TOKENS = 4
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 23_000  # 1.03 MB
GROWTH_LIMIT_MB = 5.0
DELAY_LIMIT_MS = 5.0


class Size(msgspec.Struct, frozen=True):
    """How much of each."""

    idle: int = 2000
    streams: int = 512
    holds: int = 6
    # Until the workers' simulated caches are full, a block of 64 tokens for each request and 13,337 of them, the
    # planner's index of what they hold grows with them (3 MB). Behind that it stays within 2.5 MB, to 210,000 requests.
    warmup_requests: int = 25_000
    requests: int = 100_000
    rounds: int = 10
    round_s: float = 5.0


QUICK = Size(holds=1, warmup_requests=2000, requests=4000, rounds=3, round_s=4.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="coarser, within a minute")
    arguments = parser.parse_args()
    allow_many()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bench(QUICK if arguments.quick else Size(), arguments.json))


async def _bench(size: Size, as_json: bool) -> int:
    report = new_report("soak")
    began_at = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as directory:
        model = write_random_model(Path(directory), hidden=64, num_layers=2)
        async with serving_sim(model, "--speedup", 0.1, "--max-batch-requests", 512) as server:
            await _hold_connections(server, size, report)
        async with serving_sim(model, "--speedup", 50) as server:
            await _many_requests(server, size, report)
        # Of a real model's tokenizer: that of a random one makes four times as many tokens of a text.
        async with serving_sim("smollm2-135m", "--speedup", 0.5) as server:
            await _huge_prompt(server, size, report)
    print(f"soak: {time.perf_counter() - began_at:.0f} s", file=sys.stderr)
    return finish(report, as_json)


# --- connections ------------------------------------------------------------------------------------


async def _hold_connections(server: ServeCommand, size: Size, report: Report) -> None:
    """Idle connections and streams side by side; none is lost, and all of them can be used afterwards."""
    alone_mb = server.rss_mb()
    idle = await open_many(server.port, [GET_LIVE] * size.idle, OPEN_S)
    streams = await open_many(
        server.port, [post_chat(f"stream {i}", 8000) for i in range(size.streams)], OPEN_S
    )
    usable = await _usable_after(idle, IDLE_S)  # queues and buffers take their size
    held_mb, began_at = server.rss_mb(), time.perf_counter()
    for _ in range(size.holds):
        usable = await _usable_after(idle, IDLE_S)
    grown_mb = server.rss_mb() - held_mb
    advanced = sum(one.arrived_s[-1] > began_at for one in streams)
    report.cases.append(
        {
            "case": f"{size.idle} idle connections and {size.streams} streams, {size.holds} times {IDLE_S:g} s",
            "rss_alone_mb": alone_mb,
            "rss_with_all_mb": held_mb,
            "grown_mb": grown_mb,
            "chunks": sum(len(one.arrived_s) for one in streams),
        }
    )
    report.bars += [
        at_least("idle connections that can be used afterwards", usable, "", size.idle),
        at_least("streams that go on", advanced, "", size.streams),
        at_most("growth of the runtime while they are held", grown_mb, "MB", GROWTH_LIMIT_MB),
    ]
    for one in (*idle, *streams):
        one.transport.abort()


async def _usable_after(connections: list[Connection], idle_s: float) -> int:
    await asyncio.sleep(idle_s)
    return sum([await one.ask(GET_LIVE, ANSWER_S) == 200 for one in connections])


# --- requests ---------------------------------------------------------------------------------------


async def _many_requests(server: ServeCommand, size: Size, report: Report) -> None:
    warm = await _load(server, size.warmup_requests, seed=1)
    after = await _load(server, size.requests, seed=2)
    grown_mb = after.rss_mb["runtime"] - warm.rss_mb["runtime"]
    report.cases.append(
        {
            "case": f"{size.requests} short requests behind {size.warmup_requests}",
            "rss_before_mb": warm.rss_mb["runtime"],
            "rss_after_mb": after.rss_mb["runtime"],
            "grown_mb": grown_mb,
            "requests_per_s": size.requests / after.wall_s,
        }
    )
    report.bars.append(at_most("growth of the runtime by short requests", grown_mb, "MB", GROWTH_LIMIT_MB))


async def _load(server: ServeCommand, requests: int, seed: int) -> Outcome:
    """By a client in a process of its own, which checks every answer."""
    load = Load(
        port=server.port, model=server.model, requests=requests, connections=32, max_tokens=SHORT_TOKENS,
        stream=False, seed=seed, pids={"runtime": [server.pid]},
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HTTP_LOAD), msgspec.json.encode(load).decode(), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError("the client of the short requests failed; its error is above")
    return msgspec.json.decode(output, type=Outcome)


# --- a huge prompt ----------------------------------------------------------------------------------


async def _huge_prompt(server: ServeCommand, size: Size, report: Report) -> None:
    """Rounds without and with one take turns. It is too long for the model: all the work is the endpoint's."""
    streams = await open_many(server.port, [post_chat(f"stream {i}", 8000) for i in range(32)], OPEN_S)
    huge = post_chat(LONG_TEXT, 1)
    quiet_ms, beside_ms = [], []
    for _ in range(size.rounds):
        quiet_ms.append(await _p99_gap_ms(streams, size.round_s))
        asking = asyncio.create_task(_refused_as_too_long(server.port, huge))
        beside_ms.append(await _p99_gap_ms(streams, size.round_s))
        await asking
    moved_ms = spread([beside - quiet for quiet, beside in zip(quiet_ms, beside_ms, strict=True)])
    report.cases.append(
        {
            "case": f"a prompt of {len(LONG_TEXT) / 1e6:.2f} MB beside 32 streams, in {size.round_s:g} s",
            "p99_gap_quiet_ms": spread(quiet_ms),
            "p99_gap_beside_ms": spread(beside_ms),
            "moved_ms": moved_ms,
        }
    )
    report.bars.append(
        at_most("how far a huge prompt moves the streams' p99", moved_ms.median, "ms", DELAY_LIMIT_MS)
    )
    for one in streams:
        one.transport.abort()


async def _refused_as_too_long(port: int, request: bytes) -> None:
    connection = await Connection.open(port)
    status = await connection.ask(request, ANSWER_S)
    connection.transport.abort()
    if status != 400:
        raise ValueError(f"a prompt that is too long was answered with status {status}")


async def _p99_gap_ms(streams: list[Connection], for_s: float) -> float:
    """The 99th percentile of the gaps between a stream's chunks, over all streams."""
    for one in streams:
        del one.arrived_s[:-1]
    await asyncio.sleep(for_s)
    gaps = sorted(
        1e3 * (later - earlier)
        for one in streams
        for earlier, later in zip(one.arrived_s, one.arrived_s[1:], strict=False)
    )
    return gaps[int(0.99 * (len(gaps) - 1))]


if __name__ == "__main__":
    sys.exit(main())
