"""Engines killed or stopped in mid-handoff, a runtime killed: how soon that is seen, answered and cleaned up."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rig.live_runtime import config, counter, greedy, is_clean, seconds_until, tokens_of
from rig.report import Report, at_most, finish, new_report, spread
from rig.runtime_death import Aftermath, kill_before_joined_engines, kill_with_engines

from dynrt.runtime import GenerateRequest, Runtime
from dynrt.runtime.errors import DynrtError, NoWorkerError
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.throttle import LinkSpeed

PROMPT_TOKENS, OUTPUT_TOKENS = 1500, 4
SHORT_TOKENS = 40
REMOTE_PLANS = 'dynrt_plans_total{kind="remote"}'
LINK = LinkSpeed(bytes_per_s=2e6)  # a handoff takes one and a half seconds: there is a middle of it
HEARTBEAT_S, HEARTBEAT_LIMIT_S = 0.2, 1.0
LIMIT_S = 60.0
ANSWER_LIMIT_S = 2.0  # after the fault is seen, beside the time that the same request takes undisturbed
WORKERS = ("prefill-0", "decode-0")


class Fault(msgspec.Struct, frozen=True):
    """Who is hit, and by what."""

    name: str
    victims: tuple[str, ...]
    number: signal.Signals

    @property
    def detection_limit_s(self) -> float:
        """A death is seen at once, a hang when heartbeats are overdue and the process has been killed."""
        return 0.5 if self.number is signal.SIGKILL else HEARTBEAT_LIMIT_S + 1.0


FAULTS = [
    Fault("prefill killed in mid-push", ("prefill-0",), signal.SIGKILL),
    Fault("decode killed in mid-receive", ("decode-0",), signal.SIGKILL),
    Fault("both killed", WORKERS, signal.SIGKILL),
    Fault("prefill stopped in mid-push", ("prefill-0",), signal.SIGSTOP),
    Fault("decode stopped in mid-receive", ("decode-0",), signal.SIGSTOP),
]


class Seen(msgspec.Struct, frozen=True):
    """Seconds since the fault, and how the request ended."""

    detected_s: float
    answered_s: float
    memory_s: float | None  # until no survivor holds anything; None: nobody survived
    outcome: str  # "right", "wrong", or an error
    restarted_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="each fault once, within two minutes")
    arguments = parser.parse_args()
    return asyncio.run(_bench(arguments))


async def _bench(arguments: argparse.Namespace) -> int:
    report = new_report("recovery")
    times = 1 if arguments.quick else 3
    with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as directory:
        settings = config(
            Path(directory),
            transfer=TransferOptions(throttle=LINK),
            max_batch_tokens=128,
            heartbeat_interval_s=HEARTBEAT_S,
            heartbeat_limit_s=HEARTBEAT_LIMIT_S,
            no_worker_wait_s=30.0,
        )
        for fault in FAULTS:
            async with Runtime(settings) as runtime:  # a fresh one: restarts are limited
                await _measure(runtime, fault, times, report)
        model = Path(settings.model)
        spawned = [await kill_with_engines(model) for _ in range(times)]
        _note_runtime_death("runtime killed, its engines with it", spawned, report)
        joined = [await kill_before_joined_engines(model, Path(directory)) for _ in range(times)]
        _note_runtime_death("runtime killed, engines joined", joined, report)
    return finish(report, arguments.json)


async def _measure(runtime: Runtime, fault: Fault, times: int, report: Report) -> None:
    request = greedy(PROMPT_TOKENS, OUTPUT_TOKENS, Random(1))
    expected = await tokens_of(runtime, request)
    undisturbed_s = await _seconds_of(runtime, Random(2))
    seen = [await _hit(runtime, fault, request, expected, number) for number in range(times)]
    survivors = [one.memory_s for one in seen if one.memory_s is not None]
    case: dict[str, Any] = {
        "fault": fault.name,
        "undisturbed_s": undisturbed_s,
        "detected_s": spread([one.detected_s for one in seen]),
        "answered_s": spread([one.answered_s for one in seen]),
        "restarted_s": spread([one.restarted_s for one in seen]),
        "outcomes": [one.outcome for one in seen],
    }
    report.cases.append(case)
    detected = max(one.detected_s for one in seen)
    report.bars.append(at_most(f"detected, {fault.name}", detected, "s", fault.detection_limit_s))
    late = max(one.answered_s - _could_go_on_s(one) for one in seen) - undisturbed_s
    report.bars.append(at_most(f"answered after that, {fault.name}", late, "s", ANSWER_LIMIT_S))
    if survivors:
        case["memory_returned_s"] = spread(survivors)
        held_s = max(memory_s - one.detected_s for memory_s, one in zip(survivors, seen, strict=True))
        report.bars.append(at_most(f"memory returned after that, {fault.name}", held_s, "s", ANSWER_LIMIT_S))
    wrong = sum(one.outcome not in ("right", "no worker") for one in seen)
    report.bars.append(at_most(f"wrong or lost answers, {fault.name}", wrong, "", 0))


def _note_runtime_death(name: str, seen: list[Aftermath], report: Report) -> None:
    case: dict[str, Any] = {
        "fault": name,
        "next_started_s": spread([one.started_s for one in seen]),
        "next_answered_s": spread([one.answered_s for one in seen]),
        "memory_returned_s": spread([one.memory_s for one in seen]),
    }
    report.cases.append(case)
    gone = [one.engines_gone_s for one in seen if one.engines_gone_s is not None]
    if gone:
        case["engines_gone_s"] = spread(gone)
        report.bars.append(at_most(f"engines gone, {name}", max(gone), "s", ANSWER_LIMIT_S))
    held_s = max(one.memory_s for one in seen)
    report.bars.append(at_most(f"memory returned, {name}", held_s, "s", ANSWER_LIMIT_S))
    wrong = sum(not one.is_right for one in seen)
    report.bars.append(at_most(f"wrong answers of the next runtime, {name}", wrong, "", 0))


def _could_go_on_s(seen: Seen) -> float:
    """A worker that is left serves the request alone; without any, one has to come back."""
    return seen.detected_s if seen.memory_s is not None else seen.restarted_s


async def _seconds_of(runtime: Runtime, random: Random) -> float:
    began_at = time.monotonic()
    await tokens_of(runtime, greedy(PROMPT_TOKENS, OUTPUT_TOKENS, random))
    return time.monotonic() - began_at


async def _hit(
    runtime: Runtime, fault: Fault, request: GenerateRequest, expected: list[int], number: int
) -> Seen:
    before = runtime.pids()
    salted = msgspec.structs.replace(request, salt=f"{fault.name} {number}")  # no cached prefix shortens it
    task = asyncio.create_task(_outcome(runtime, salted, expected))
    await seconds_until(lambda: _is_in_the_middle(runtime), LIMIT_S)
    began_at = time.monotonic()
    for victim in fault.victims:
        os.kill(before[victim], fault.number)
    survivors = set(WORKERS) - set(fault.victims)
    detected, memory, restarted, (outcome, answered_at) = await asyncio.gather(
        seconds_until(lambda: _is_lost(runtime, before, fault.victims), LIMIT_S),
        seconds_until(lambda: _holds_nothing(runtime, before, fault.victims, survivors), LIMIT_S),
        seconds_until(lambda: _is_back(runtime, before, fault.victims), LIMIT_S),
        task,
    )
    await seconds_until(lambda: is_clean(runtime), LIMIT_S)
    await seconds_until(lambda: _hands_off(runtime), LIMIT_S)
    return Seen(detected, answered_at - began_at, memory if survivors else None, outcome, restarted)


async def _outcome(runtime: Runtime, request: GenerateRequest, expected: list[int]) -> tuple[str, float]:
    try:
        outcome = "right" if await tokens_of(runtime, request) == expected else "wrong"
    except NoWorkerError:
        outcome = "no worker"
    except DynrtError as error:
        outcome = error.message
    return outcome, time.monotonic()


async def _is_in_the_middle(runtime: Runtime) -> bool:
    """Both ends have opened the handoff."""
    statuses = await runtime.status()
    return all(worker in statuses and statuses[worker].open_handoffs for worker in WORKERS)


def _is_lost(runtime: Runtime, before: dict[str, int], victims: tuple[str, ...]) -> bool:
    now = runtime.pids()
    return all(now.get(victim) != before[victim] for victim in victims)


def _is_back(runtime: Runtime, before: dict[str, int], victims: tuple[str, ...]) -> bool:
    return set(runtime.pids()) == set(WORKERS) and _is_lost(runtime, before, victims)


async def _hands_off(runtime: Runtime) -> bool:
    """The pair is connected again: until then, each worker serves alone."""
    before = counter(runtime, REMOTE_PLANS)
    await tokens_of(runtime, greedy(SHORT_TOKENS, OUTPUT_TOKENS, Random(time.monotonic_ns())))
    return counter(runtime, REMOTE_PLANS) > before


async def _holds_nothing(
    runtime: Runtime, before: dict[str, int], victims: tuple[str, ...], survivors: set[str]
) -> bool:
    """The fault's handoff is over on the worker that was not hit; a new one needs the other to come back."""
    if not _is_lost(runtime, before, victims):
        return False  # one that is stopped would not answer
    statuses = await runtime.status()
    return all(worker in statuses and not statuses[worker].open_handoffs for worker in survivors)


if __name__ == "__main__":
    sys.exit(main())
