"""The one form in which every bench reports: machine, versions, cases, bars."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

PACKAGES = ("dynrt", "torch", "nixl", "pyzmq", "msgspec", "aiohttp", "uvloop")


class Bar(msgspec.Struct, frozen=True):
    """A claim: `value` must be at least (or at most) `limit`."""

    name: str
    value: float
    unit: str
    limit: float
    sense: Literal[">=", "<="]
    ok: bool


class Spread(msgspec.Struct, frozen=True):
    """How a repeated measurement came out."""

    median: float
    p10: float
    p90: float
    n: int


class Report(msgspec.Struct):
    """Printed as one JSON object with `--json`, else as lines for people."""

    bench: str
    machine: dict[str, Any]
    versions: dict[str, str]
    cases: list[dict[str, Any]]
    bars: list[Bar]


def new_report(bench: str) -> Report:
    return Report(bench, describe_machine(), _versions(), [], [])


def at_least(name: str, value: float, unit: str, limit: float) -> Bar:
    return Bar(name, value, unit, limit, ">=", value >= limit)


def at_most(name: str, value: float, unit: str, limit: float) -> Bar:
    return Bar(name, value, unit, limit, "<=", value <= limit)


def spread(values: Sequence[float]) -> Spread:
    """Median and the tenth and ninetieth percentile (nearest rank)."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(
        statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered)
    )


def finish(report: Report, as_json: bool) -> int:
    """Print it; the exit status is 1 if a bar is missed."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print_for_people(report)
    return 0 if all(bar.ok for bar in report.bars) else 1


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _print_for_people(report: Report) -> None:
    print(f"{report.bench} on {report.machine['cpu']}, {report.machine['cores']} cores")
    for case in report.cases:
        print("  " + ", ".join(f"{name}={_show(value)}" for name, value in case.items()))
    for bar in report.bars:
        verdict = "ok" if bar.ok else "MISSED"
        print(f"  {verdict}: {bar.name} is {bar.value:.4g} {bar.unit}, must be {bar.sense} {bar.limit:g}")
    sys.stdout.flush()


def _show(value: object) -> str:
    if isinstance(value, Spread):
        return f"{value.median:.4g} ({value.p10:.4g} to {value.p90:.4g}, n={value.n})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
