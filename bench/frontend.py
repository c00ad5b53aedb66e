"""What the front process costs: CPU per token and per request, beside Dynamo's frontend and vllm-router."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from rig import decode_step, engine_alone, front_peers, front_servers, http_load, report, text_work

from dynrt.engines.models.resolve import find_ready

PACED_SHARE_OF_DYNAMO = 0.30
PACED_SHARE_OF_ROUTER = 0.8
SHORT_SHARE_OF_DYNAMO = 0.45
LONG_SHARE_OF_DYNAMO = 1.1
REPEATED_SHARE_OF_DYNAMO = 1.0
TEXT_SHARE_OF_DYNAMO = 0.5
TTFT_OVER_ENGINE_S = 1e-3
RSS_MB = 120.0
STEP_SHARE = 0.03
LOAD_S = 300.0
ALONE_REQUESTS = 200
STEP_PAIRS = 40
LONG_WORDS = 2080  # 4,000 tokens of the default model's
SYSTEM_WORDS = 2000  # of them, where the beginning repeats

Cpu = dict[tuple[str, str], list[http_load.Outcome]]  # by server and load


def loads(quick: bool) -> dict[str, dict[str, Any]]:
    """By name: short requests, long prompts, long prompts behind one system prompt, one stream at a time."""
    scale = 4 if quick else 1
    return {
        "short": {
            "requests": 4000 // scale,
            "connections": 32,
            "max_tokens": 1,
            "stream": False,
            "warmup": 400,
        },
        "long": long_prompts(240 // scale),
        "repeated": {**long_prompts(480 // scale), "system_words": SYSTEM_WORDS},
        "alone": {"requests": 200 // scale, "connections": 1, "max_tokens": 8, "stream": True},
    }


def long_prompts(requests: int) -> dict[str, Any]:
    return {
        "requests": requests,
        "connections": 8,
        "max_tokens": 1,
        "stream": False,
        "prompt_words": LONG_WORDS,
        "warmup": 16,
    }


def paced() -> dict[str, Any]:
    """64 streams at an engine's pace, for two seconds: every token is a write of its own.

    Not for longer, as a machine's speed changes: what is compared must come close behind one another, and often.
    """
    return {
        "requests": 64,
        "connections": 64,
        "max_tokens": 256,
        "stream": True,
        "warmup": 64,
    }


def put(server: front_servers.Server, load: dict[str, Any], seed: int) -> http_load.Outcome:
    """Put `load` on a server, from a process of its own."""
    asked = http_load.Load(port=server.port, model=server.model, pids=server.pids, seed=seed, **load)
    command = [sys.executable, http_load.__file__, msgspec.json.encode(asked).decode()]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LOAD_S, check=True)
    return msgspec.json.decode(done.stdout, type=http_load.Outcome)


def measure(
    servers: Sequence[front_servers.Server], wanted: dict[str, dict[str, Any]], rounds: int, outcomes: Cpu
) -> None:
    """Every server in turn, `rounds` times; prompts are fresh in each, as a peer may keep what it tokenized.

    There and back, so that none always comes behind the same other one.
    """
    for seed in range(rounds):
        for name, load in wanted.items():
            for server in servers if seed % 2 else servers[::-1]:
                outcomes.setdefault((server.name, name), []).append(put(server, load, seed))


Start = Callable[[float], AbstractContextManager[front_servers.Server]]


def sides(model: Path, folder: Path, missing: list[str]) -> Iterator[Start]:
    """How to start each server with engines of a pace; peers that cannot be had are named."""
    yield lambda step_s: front_servers.dynrt(model, folder, step_s)
    dynamo = front_peers.dynamo_python()
    if isinstance(dynamo, Path):
        yield lambda step_s: front_servers.dynamo(dynamo, model, folder, step_s)
    else:
        missing.append(f"dynamo: {dynamo}")


def run(quick: bool) -> report.Report:
    result = report.new_report("frontend")
    model_dir = find_ready(None)
    if model_dir is None:
        sys.exit("the default model is not here; run `dynrt serve` once to fetch it")
    model = Path(model_dir.path)
    rounds, paced_rounds = (1, 3) if quick else (3, 24)
    outcomes: Cpu = {}
    missing: list[str] = []
    with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as name:
        folder = Path(name)
        starts = list(sides(model, folder, missing))
        router = front_peers.vllm_router_python()
        with ExitStack() as stack:
            servers = [stack.enter_context(start(front_servers.STEP_S)) for start in starts]
            if isinstance(router, Path):
                servers.append(stack.enter_context(front_servers.vllm_router(router, folder)))
            else:
                missing.append(f"vllm-router: {router}")
            measure(servers, {"paced": paced()}, paced_rounds, outcomes)
        with ExitStack() as stack:
            servers = [stack.enter_context(start(0.0)) for start in starts]
            measure(servers, loads(quick), rounds, outcomes)
    result.cases = [case(server, load, runs) for (server, load), runs in outcomes.items()]
    result.cases += [{"missing": reason} for reason in missing]
    add_cpu_bars(result, outcomes, text_work.measure(model))
    add_time_bars(result, outcomes, model, quick)
    return result


def case(server: str, load: str, runs: list[http_load.Outcome]) -> dict[str, Any]:
    ttft_ms = [median(one.ttft_s) * 1e3 for one in runs]
    return {
        "server": server,
        "load": load,
        "front_cpu_us": report.spread(
            [per_unit(one, load, "front") * 1e6 for one in runs]
        ),  # a token, or a request
        "engines_cpu_us": report.spread([per_unit(one, load, "engines") * 1e6 for one in runs]),
        "ttft_ms": report.spread(ttft_ms),
        "tokens_per_read": median(one.tokens / one.reads for one in runs),
        "front_rss_mb": max(one.rss_mb["front"] for one in runs),
    }


def per_unit(outcome: http_load.Outcome, load: str, label: str) -> float:
    """CPU seconds of processes per streamed token, or else per request."""
    return outcome.cpu_s[label] / (outcome.tokens if load == "paced" else len(outcome.latency_s))


def add_cpu_bars(result: report.Report, outcomes: Cpu, text: text_work.TextWork) -> None:
    """Ratios are medians of the rounds' own, as a machine's speed changes between rounds."""

    def front(server: str, load: str) -> list[float]:
        return [per_unit(one, load, "front") for one in outcomes[server, load]]

    def share(name: str, load: str, peer: str, limit: float) -> None:
        if (peer, load) in outcomes:
            ratios = [
                ours / theirs for ours, theirs in zip(front("dynrt", load), front(peer, load), strict=True)
            ]
            result.bars.append(report.at_most(name, median(ratios), f"of {peer}'s CPU", limit))

    share("streamed tokens, paced", "paced", "dynamo", PACED_SHARE_OF_DYNAMO)
    share("streamed tokens, paced", "paced", "vllm-router", PACED_SHARE_OF_ROUTER)
    share("short requests", "short", "dynamo", SHORT_SHARE_OF_DYNAMO)
    share("prompts of 4,000 tokens", "long", "dynamo", LONG_SHARE_OF_DYNAMO)
    share("prompts of 4,000 tokens behind one system prompt", "repeated", "dynamo", REPEATED_SHARE_OF_DYNAMO)
    if ("dynamo", "paced") in outcomes:
        both = [
            (ours + text.token_s) / (theirs + per_unit(run, "paced", "engines"))
            for ours, theirs, run in zip(
                front("dynrt", "paced"), front("dynamo", "paced"), outcomes["dynamo", "paced"], strict=True
            )
        ]
        result.bars.append(
            report.at_most(
                "front and engines' text work",
                median(both),
                "of dynamo's with its mocker",
                TEXT_SHARE_OF_DYNAMO,
            )
        )
    rss_mb = max(
        run.rss_mb["front"] for (server, _), runs in outcomes.items() for run in runs if server == "dynrt"
    )
    result.bars.append(report.at_most("resident memory of the front", rss_mb, "MB", RSS_MB))
    result.cases.append({"engines' text work, a token": text.token_s, "of it events": text.frame_s})


def add_time_bars(result: report.Report, outcomes: Cpu, model: Path, quick: bool) -> None:
    """The first token beside the engine's own; decode steps of a real engine with text work and without."""
    ttft_s = median([median(one.ttft_s) for one in outcomes["dynrt", "alone"]])
    engine_s = median(engine_alone.first_token_s(model, ALONE_REQUESTS))
    result.cases.append({"time to first token": ttft_s, "of it the engine's own": engine_s})
    over_s = ttft_s - engine_s
    result.bars.append(
        report.at_most("time to first token over the engine's", over_s, "s", TTFT_OVER_ENGINE_S)
    )
    steps = decode_step.measure(model, STEP_PAIRS // (4 if quick else 1))
    result.cases.append(msgspec.to_builtins(steps))
    result.bars.append(
        report.at_most("a decode step of 64 streams is longer for text", steps.longer, "", STEP_SHARE)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="coarser, within a minute or two")
    arguments = parser.parse_args()
    return report.finish(run(arguments.quick), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
