"""Counts every request; one event for each on the logger `dynrt.http`, but for probes, and never a prompt."""

from __future__ import annotations

import asyncio
import logging

from dynrt.runtime.http.request import Request
from dynrt.runtime.http.request_record import RequestRecord
from dynrt.runtime.logs import tell, trace_fields

log = logging.getLogger("dynrt.http")

QUIET_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics"})
CLIENT_LEFT_STATUS = 499  # nginx's number for a client that closed before it was answered; never sent
MAX_PATH_CHARS = 200


def note_answer(request: Request, status: int, started_s: float) -> None:
    """Count and log `request`, which came at `started_s` in the loop's time."""
    request.endpoint.http_counter.answered(request.route, status)
    if request.path not in QUIET_PATHS and log.isEnabledFor(logging.INFO):
        tell(log, "request", _fields(request, status, started_s))


def status_of_cut_off(record: RequestRecord) -> int:
    """Of a request whose client closed; clients close a stream as soon as they have read its end."""
    if record.sent_status is not None:
        return record.sent_status
    if record.outcome == "answered":
        record.outcome = "client_left"
    return CLIENT_LEFT_STATUS


def _fields(request: Request, status: int, started_s: float) -> dict[str, object]:
    record = request.record
    fields: dict[str, object] = {
        "method": request.method,
        "path": request.raw_path[:MAX_PATH_CHARS],
        "status": status,
        "outcome": record.outcome,
        "duration_s": asyncio.get_running_loop().time() - started_s,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "request": record.request_id,
    }
    if record.first_output_at is not None:
        fields["ttft_s"] = record.first_output_at - started_s
    if record.traceparent:
        fields.update(trace_fields(record.traceparent))
    return fields
