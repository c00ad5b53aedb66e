"""How long the choice of workers takes, with 32 prefill and 32 decode workers and prompts of 32,768 tokens."""

from __future__ import annotations

import argparse
import sys
import time
from random import Random
from typing import Literal

from rig.index_workload import random_tokens
from rig.report import Report, at_most, finish, new_report, spread

from dynrt.planner.plan import Plan, PlanRequest, WorkerFacts
from dynrt.planner.planner import Planner
from dynrt.runtime.messages import EngineLoad, StepTiming

NUM_PREFILL = NUM_DECODE = 32
PROMPT_TOKENS = 32_768
SHARED_TOKENS = PROMPT_TOKENS // 2
SYSTEM_PROMPTS = 100
WAITING_REQUESTS = 64  # of which none has its first token
OPEN_REQUESTS = 512
P99_BAR_MS = 1.0
MS = 1e3

LocalPrefill = Literal["auto", "never", "always"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="coarser, within a minute")
    arguments = parser.parse_args()
    report = new_report("choice")
    for local_prefill in ("auto", "never", "always"):
        _measure(local_prefill, 1000 if arguments.quick else 5000, report)
    return finish(report, arguments.json)


def _measure(local_prefill: LocalPrefill, count: int, report: Report) -> None:
    fleet = _Fleet(local_prefill)
    for _ in range(OPEN_REQUESTS):
        fleet.plan()
    took_ms = [MS * fleet.plan() for _ in range(count)]
    p99_ms = sorted(took_ms)[round(0.99 * (count - 1))]
    report.cases.append(
        {"local_prefill": local_prefill, "cpu_ms": spread(took_ms), "p99_ms": p99_ms, "kinds": fleet.kinds}
    )
    report.bars.append(
        at_most(f"CPU of a choice at p99, local prefill {local_prefill}", p99_ms, "ms", P99_BAR_MS)
    )


class _Fleet:
    """A busy fleet: so many requests are always open, and every worker has made steps of its own."""

    def __init__(self, local_prefill: LocalPrefill) -> None:
        self.kinds = {"remote": 0, "local": 0}
        self._local_prefill = local_prefill
        self._random = Random(7)
        self._planner = Planner(Random(8))
        self._count = 0
        self._system_prompts = [random_tokens(self._random, SHARED_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        self._join(
            [f"p{number}" for number in range(NUM_PREFILL)], [f"d{number}" for number in range(NUM_DECODE)]
        )

    def plan(self) -> float:
        """CPU seconds of the thread for the next request's plan."""
        own = random_tokens(self._random, PROMPT_TOKENS - SHARED_TOKENS)
        prompt = self._random.choice(self._system_prompts) + own
        request = PlanRequest(_key(self._count), "", prompt, 200, self._local_prefill)
        began = time.thread_time()
        plan = self._planner.plan(request, 0.01 * self._count)
        took_s = time.thread_time() - began
        assert isinstance(plan, Plan), plan
        assert plan.prompt_tokens == PROMPT_TOKENS and plan.prefill_hit_tokens <= SHARED_TOKENS
        self.kinds[plan.kind] += 1
        self._count += 1
        self._go_on(plan)
        return took_s

    def _join(self, prefills: list[str], decodes: list[str]) -> None:
        for name in [*prefills, *decodes]:
            role: Literal["prefill", "decode"] = "prefill" if name in prefills else "decode"
            self._planner.worker_joined(WorkerFacts(name, role, 16, 140_000, 131_072, 32, num_blocks=10**6))
            for _ in range(16):
                self._planner.step(name, EngineLoad(), self._timing())
        for prefill in prefills:
            for decode in decodes:
                self._planner.pair_connected(prefill, decode)
                self._planner.pushed(prefill, decode, int(self._random.uniform(5e9, 2e10)), 1.0)

    def _go_on(self, plan: Plan) -> None:
        """An older request gets its first token, a still older one ends, and a step is reported."""
        self._planner.first_token(_key(self._count - WAITING_REQUESTS))
        self._planner.finished(_key(self._count - OPEN_REQUESTS))
        self._planner.step(plan.prefill, EngineLoad(), self._timing())

    def _timing(self) -> StepTiming:
        tokens, requests = self._random.randrange(1, 8192), self._random.randrange(32)
        duration_s = (5 + 0.05 * tokens + 0.1 * requests) * self._random.uniform(0.9, 1.1) / 1e3
        return StepTiming(duration_s, 0.0, tokens, tokens**2, requests, 1000 * requests)


def _key(number: int) -> bytes:
    return (number + OPEN_REQUESTS).to_bytes(16, "big")


if __name__ == "__main__":
    sys.exit(main())
