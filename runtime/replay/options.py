"""The options of `dynrt replay`. Imports nothing of it: the command line is read by every engine process too."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them; what their values may be is checked when they are used."""
    _add_fleet(parser)
    _add_load(parser)
    _add_output(parser)


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    for name in ("prefill", "decode"):
        parser.add_argument(
            f"--{name}", type=int, default=4, metavar="N", help=f"{name} workers (default: 4)"
        )
    parser.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help="KV cache blocks of each worker (default: by the GPU's memory)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=512,
        metavar="N",
        help="tokens in a block; small ones take long to replay (default: 512, as in Mooncake's traces)",
    )
    parser.add_argument(
        "--model", default="llama-3.1-8b", metavar="MODEL", help="whose time is kept (default: llama-3.1-8b)"
    )
    parser.add_argument("--gpu", default="h100", metavar="GPU", help="a100, h100 or h200 (default: h100)")
    parser.add_argument(
        "--profile", metavar="PROFILE", help="instead of --model and --gpu: dynamo-mocker or a JSON file"
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens computed in one step (default: 8192)",
    )
    parser.add_argument(
        "--max-batch-requests", type=int, default=256, metavar="N", help="requests in one step (default: 256)"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path, help="Mooncake's JSON lines or Azure's CSV")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="who chooses the workers: planner (the default), round-robin, random, least-loaded, cache-aware, "
        "kv-formula, kv-formula-16, ttft-a1, ttft-a2 or ttft-a8; all: each in turn; may be given several times",
    )
    parser.add_argument(
        "--local-prefill",
        default="auto",
        choices=("auto", "never", "always"),
        help="prefill on decode workers, for the policy planner: by cost, never or always (default: auto)",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="only the trace's first N (default: all)")
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="F", help="how much faster requests come (default: 1)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed, the same course (default: 0)"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ttft-limit",
        type=float,
        default=2.0,
        metavar="S",
        help="of a good request's first token (default: 2)",
    )
    parser.add_argument(
        "--itl-limit",
        type=float,
        default=0.05,
        metavar="S",
        help="of a good request's mean time between tokens (default: 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a picture; needs dynrt[plot]")
