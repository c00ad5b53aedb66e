"""aiperf, with clients that cancel, against a live server, whose /metrics fill its summary (1.2 GB to install)."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rig.client_python import ClientEnvironmentError, client_python
from rig.report import Report, at_least, at_most, finish, new_report
from rig.serve_command import ServeCommand, serving

AIPERF = "aiperf==0.13.0"
LITELLM = "litellm==1.110.2"  # its wheel has the table of the tokenizer that aiperf makes prompts with
BUILD_S = 1500.0
RUN_S = 600.0
CANCELLED_STATUS = 499
# What aiperf's summary of a server is made of, and what it has of each request.
SERVER_METRICS = (
    "vllm:prefix_cache_hits",
    "vllm:prefix_cache_queries",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    arguments = parser.parse_args()
    report = new_report("aiperf")
    try:
        asyncio.run(_bench(report, num_requests=24 if arguments.quick else 80))
    except ClientEnvironmentError as error:
        print(f"aiperf cannot be had here: {error}", file=sys.stderr)
        return 1
    return finish(report, arguments.json)


async def _bench(report: Report, num_requests: int) -> None:
    aiperf = client_python("aiperf", [AIPERF], deadline_s=BUILD_S).with_name("aiperf")
    tables = _tokenizer_tables(client_python("litellm-files", [LITELLM], resolve=False, deadline_s=BUILD_S))
    with tempfile.TemporaryDirectory(prefix="dynrt-aiperf-") as directory:
        async with serving("--threads", 1) as server:
            await asyncio.to_thread(_run, aiperf, tables, server, num_requests, Path(directory))
        _judge(report, num_requests, Path(directory))


def _tokenizer_tables(python: Path) -> Path:
    [folder] = python.parents[1].glob("lib/python*/site-packages/litellm/litellm_core_utils/tokenizers")
    return folder


def _run(aiperf: Path, tables: Path, server: ServeCommand, num_requests: int, artifacts: Path) -> None:
    """Raises CalledProcessError, TimeoutExpired."""
    command = [
        aiperf, "profile", "-m", server.model, "--url", f"http://127.0.0.1:{server.port}",
        "--endpoint-type", "chat", "--streaming", "--tokenizer", "builtin", "--isl", 64, "--osl", 16,
        "--request-count", num_requests, "--concurrency", 4,
        "--request-cancellation-rate", 25, "--request-cancellation-delay", 0.1,
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--no-gpu-telemetry",
        "--output-artifact-dir", artifacts,
    ]  # fmt: skip
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": str(tables), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [str(one) for one in command], env=environment, stdout=sys.stderr, check=True, timeout=RUN_S
    )


def _judge(report: Report, num_requests: int, artifacts: Path) -> None:
    profile = _read(artifacts / "profile_export_aiperf.json")
    server = _read(artifacts / "server_metrics_export.json")
    by_status = {one["error_details"]["code"]: one["count"] for one in profile["error_summary"]}
    answered = int(profile["request_count"]["avg"])
    cancelled = by_status.pop(CANCELLED_STATUS, 0)
    found = sorted(name for name in server["metrics"] if name.startswith("vllm:"))
    report.cases.append(
        {
            "answered": answered,
            "cancelled": cancelled,
            "other_errors": by_status,
            "ttft_ms": profile["time_to_first_token"]["avg"],
            "inter_token_ms": profile["inter_token_latency"]["avg"],
            "server_metrics": found,
        }
    )
    missing = [name for name in SERVER_METRICS if not _has_values(server["metrics"].get(name))]
    report.bars += [
        at_least("requests answered or cancelled", answered + cancelled, "requests", num_requests),
        at_least("requests cancelled", cancelled, "requests", 1),
        at_most("other errors", sum(by_status.values()), "requests", 0),
        at_most(f"server metrics missing {missing or ''}".strip(), len(missing), "names", 0),
    ]


def _read(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def _has_values(metric: dict[str, Any] | None) -> bool:
    return metric is not None and any(series.get("stats") for series in metric["series"])


if __name__ == "__main__":
    sys.exit(main())
