"""What the times of a request add up to, and the spans that they are."""

from __future__ import annotations

from dynrt.runtime.request_times import RequestTimes, StageTimes
from dynrt.runtime.stage_spans import stage_spans

Spans = list[tuple[str, float, float]]


def times_of(*stages: StageTimes) -> RequestTimes:
    """Begun at 1, with tokens from 6 to 9."""
    return RequestTimes(1.0, first_token_at=6.0, last_token_at=9.0, stages=list(stages))


def spans_of(times: RequestTimes) -> Spans:
    return [(span.name, span.begins_at, span.ends_at) for span in stage_spans(times)]


LOCAL = StageTimes("d", "d", planned_at=2.0, admitted_at=3.0, computed_at=6.0, ended_at=9.5)
REMOTE = StageTimes(
    "p", "d", planned_at=2.0, admitted_at=3.0, computed_at=6.0, received_at=6.5, ended_at=9.5, kv_bytes=7
)


def test_nothing_is_known_of_a_request_that_was_never_planned() -> None:
    times = RequestTimes(1.0)
    assert (times.admitted_at, times.computed_at) == (None, None)
    assert spans_of(times) == []


def test_spans_of_a_local_request() -> None:
    assert spans_of(times_of(LOCAL)) == [
        ("plan", 1.0, 2.0),
        ("queue", 2.0, 3.0),
        ("prefill", 3.0, 6.0),
        ("decode", 6.0, 9.0),
    ]


def test_a_transfer_lies_within_prefill_but_for_what_is_exposed() -> None:
    times = times_of(REMOTE)
    assert spans_of(times)[2:] == [("prefill", 3.0, 6.0), ("transfer", 3.0, 6.5), ("decode", 6.5, 9.0)]
    [transfer] = [span for span in stage_spans(times) if span.name == "transfer"]
    assert transfer.values["dynrt.transfer.exposed_s"] == 0.5
    assert (transfer.values["dynrt.transfer.kv_bytes"], transfer.values["dynrt.worker"]) == (7, "d")


def test_an_attempt_that_came_to_nothing_is_told_with_its_reason() -> None:
    lost = StageTimes("p", "d", planned_at=1.5, admitted_at=1.6, ended_at=1.8, reason="a worker was lost")
    times = times_of(lost, LOCAL)
    assert spans_of(times)[:3] == [("plan", 1.0, 1.5), ("queue", 1.5, 1.6), ("plan", 1.8, 2.0)]
    attempts = [
        (span.values["dynrt.attempt"], span.values.get("dynrt.attempt.reason")) for span in stage_spans(times)
    ]
    assert attempts == [(0, "a worker was lost")] * 2 + [(1, None)] * 4
    assert times.admitted_at == 3.0, "when the prompt began to be computed for good"
