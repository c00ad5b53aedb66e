"""The stages of an ended request as spans of time: plan, queue, prefill, transfer and decode of each attempt."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dynrt.runtime.request_times import RequestTimes, StageTimes

SpanValue = str | int | float


class StageSpan(msgspec.Struct, frozen=True):
    """Seconds of this host's CLOCK_MONOTONIC."""

    name: str
    begins_at: float
    ends_at: float
    values: dict[str, SpanValue]


def stage_spans(times: RequestTimes) -> Iterator[StageSpan]:
    """In the order of their beginnings; what did not come about, or was not over, is left out."""
    begins_at = times.began_at
    for number, stage in enumerate(times.stages):
        is_last = number == len(times.stages) - 1
        tokens_end_at = times.last_token_at if is_last else stage.ended_at
        values: dict[str, SpanValue] = {"dynrt.attempt": number}
        if stage.reason:
            values["dynrt.attempt.reason"] = stage.reason
        for span in _of_attempt(stage, begins_at, tokens_end_at):
            yield msgspec.structs.replace(span, values=span.values | values)
        begins_at = stage.ended_at if stage.ended_at is not None else begins_at


def _of_attempt(stage: StageTimes, begins_at: float, tokens_end_at: float | None) -> Iterator[StageSpan]:
    """`tokens_end_at`: when the last token came."""
    prefill: dict[str, SpanValue] = {"dynrt.worker": stage.prefill}
    decode: dict[str, SpanValue] = {"dynrt.worker": stage.decode}
    yield from _span("plan", begins_at, stage.planned_at, {})
    yield from _span("queue", stage.planned_at, stage.admitted_at, prefill)
    yield from _span("prefill", stage.admitted_at, stage.computed_at, prefill)
    transfer_begins_at = stage.planned_at if stage.admitted_at is None else stage.admitted_at
    yield from _span("transfer", transfer_begins_at, stage.received_at, _transfer_values(stage))
    can_decode_at = stage.received_at if stage.is_remote else stage.computed_at
    if can_decode_at is not None and stage.computed_at is not None:
        can_decode_at = max(can_decode_at, stage.computed_at)
    yield from _span("decode", can_decode_at, tokens_end_at, decode)


def _transfer_values(stage: StageTimes) -> dict[str, SpanValue]:
    """Layers are pushed as they are computed, so most of a transfer lies within prefill; the rest is exposed."""
    values: dict[str, SpanValue] = {
        "dynrt.worker": stage.decode,
        "dynrt.transfer.kv_bytes": stage.kv_bytes,
        "dynrt.transfer.link_s": stage.link_s,
    }
    if stage.received_at is not None and stage.computed_at is not None:
        values["dynrt.transfer.exposed_s"] = max(0.0, stage.received_at - stage.computed_at)
    return values


def _span(
    name: str, begins_at: float | None, ends_at: float | None, values: dict[str, SpanValue]
) -> Iterator[StageSpan]:
    if begins_at is not None and ends_at is not None:
        yield StageSpan(name, begins_at, max(begins_at, ends_at), values)
