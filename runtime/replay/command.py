"""`dynrt replay`: from the command line to the table."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec

from dynrt.engines.sim.profile import find_profile
from dynrt.planner.traces import (
    CONVERSATION_TICK_S,
    TraceRequest,
    compress_arrivals,
    has_ticks,
    read_trace,
    spread_arrivals,
)
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.replay.plot import check_can_plot, plot
from dynrt.runtime.replay.policies import OURS, POLICIES
from dynrt.runtime.replay.progress import Progress
from dynrt.runtime.replay.replay import ReplayConfig, Replayed, check_fits, replay
from dynrt.runtime.replay.summary import Limits, Summary, summarize
from dynrt.runtime.replay.table import table

ALL = "all"


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError."""
    limits = Limits(_positive(arguments, "ttft_limit"), _positive(arguments, "itl_limit"))
    config = _config(arguments)
    policies = _policies(arguments.policy)
    if arguments.plot is not None:
        check_can_plot(arguments.plot)
    requests = load_requests(arguments.trace, arguments.requests, _positive(arguments, "rate"), config.seed)
    check_fits(requests, config)
    with _only_errors_logged():
        replays = [_replay(requests, config, policy) for policy in policies]
    summaries = [summarize(replayed, limits) for replayed in replays]
    _print(requests, config, summaries, arguments.json)
    if arguments.plot is not None:
        plot(replays, arguments.plot)
    return 0


def load_requests(path: Path, count: int | None, rate: float, seed: int) -> list[TraceRequest]:
    """The trace's first `count` requests, `rate` times as fast. Raises ConfigError."""
    try:
        requests = read_trace(path)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"trace {path}: {error}") from error
    if count is not None and count < 1:
        raise ConfigError(f"--requests is {count}; at least 1")
    if has_ticks(requests):
        requests = spread_arrivals(requests, CONVERSATION_TICK_S, Random(seed))
    answered = [request for request in requests if request.output_tokens > 0][:count]
    if not answered:
        raise ConfigError(f"trace {path} holds no request that has an answer; at least one is needed")
    return compress_arrivals(answered, rate)


def _config(arguments: argparse.Namespace) -> ReplayConfig:
    config = ReplayConfig(
        prefill=arguments.prefill,
        decode=arguments.decode,
        profile=arguments.profile or f"{arguments.model}@{arguments.gpu}",
        blocks=arguments.blocks,
        block_size=arguments.block_size,
        max_batch_tokens=arguments.max_batch_tokens,
        max_batch_requests=arguments.max_batch_requests,
        local_prefill=arguments.local_prefill,
        seed=arguments.seed,
    )
    for name, least in (("blocks", 2), ("block_size", 1), ("decode", 1), ("prefill", 0)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; at least {least}")
    find_profile(config.profile)  # now: what is wrong with it should not come after the trace was read
    return config


def _positive(arguments: argparse.Namespace, name: str) -> float:
    value: float = getattr(arguments, name)
    if not value > 0:
        raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be above 0")
    return value


def _policies(chosen: Sequence[str] | None) -> list[str]:
    """Each once, in the order in which they are named."""
    if not chosen:
        return [OURS]
    for name in chosen:
        if name not in (*POLICIES, ALL):
            raise ConfigError(f"--policy is {name!r}; give {ALL} or one of {', '.join(POLICIES)}")
    return list(POLICIES) if ALL in chosen else list(dict.fromkeys(chosen))


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    """What befalls single requests goes into the numbers."""
    log = logging.getLogger("dynrt")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _replay(requests: Sequence[TraceRequest], config: ReplayConfig, policy: str) -> Replayed:
    progress = Progress(policy, len(requests), sys.stderr)
    try:
        return replay(requests, config, policy, progress.advance)
    finally:
        progress.end()


def _print(
    requests: Sequence[TraceRequest], config: ReplayConfig, summaries: Sequence[Summary], as_json: bool
) -> None:
    if as_json:
        print(msgspec.json.encode({"config": config, "policies": summaries}).decode())
        return
    print(
        f"{len(requests)} requests in {requests[-1].arrival_s:.0f} s on {config.prefill} prefill and "
        f"{config.decode} decode workers, {config.profile}, {config.num_blocks} blocks of {config.block_size} each\n"
    )
    print(table(summaries))
    for summary in summaries:
        if summary.first_error is not None:
            print(f"{summary.policy}: {summary.failed} requests failed; the first: {summary.first_error}")
