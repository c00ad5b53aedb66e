"""Summaries of replays as a table of plain text, a row for each policy."""

from __future__ import annotations

from collections.abc import Sequence

from dynrt.runtime.replay.summary import Summary

_HEADER = (
    "policy",
    "hit %",
    "TTFT p50 s",
    "p90",
    "p99",
    "ITL p50 ms",
    "p90",
    "p99",
    "goodput/s",
    "good %",
    "imbalance",
    "busy %",
    "failed",
)


def table(summaries: Sequence[Summary]) -> str:
    """The first column is flush left, the others right."""
    rows = [_HEADER, *map(_row, summaries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join([row[0].ljust(widths[0]), *cells])


def _row(summary: Summary) -> tuple[str, ...]:
    ttft_s, itl_s = summary.ttft_s, summary.itl_s
    return (
        summary.policy,
        f"{100 * summary.hit_share:.1f}",
        *(f"{value:.2f}" for value in (ttft_s.p50, ttft_s.p90, ttft_s.p99)),
        *(f"{1e3 * value:.1f}" for value in (itl_s.p50, itl_s.p90, itl_s.p99)),
        f"{summary.goodput_per_s:.2f}",
        f"{100 * summary.good_share:.1f}",
        f"{summary.imbalance:.2f}",
        f"{100 * summary.busy_share:.0f}",
        str(summary.failed),
    )
