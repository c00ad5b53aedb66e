"""Counts every request; one event for each on the logger `dynrt.http`, but for probes, and never a prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from dynrt.runtime.http.request_record import RequestRecord, record_of
from dynrt.runtime.http_counts import NO_ROUTE, HttpCounter
from dynrt.runtime.logs import trace_fields

log = logging.getLogger("dynrt.http")

HTTP_COUNTER = web.AppKey("http_counter", HttpCounter)

QUIET_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics"})
CLIENT_LEFT_STATUS = 499  # nginx's number for a client that closed before it was answered; never sent
MAX_PATH_CHARS = 200

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: sees the status of every answer, and the requests that got none."""
    started_s = asyncio.get_running_loop().time()
    status = CLIENT_LEFT_STATUS
    try:
        response = await handler(request)
        status = response.status
        return response
    except asyncio.CancelledError:
        status = _cut_off(record_of(request))
        raise
    finally:
        request.app[HTTP_COUNTER].answered(route_of(request), status)
        if request.path not in QUIET_PATHS:
            _write(request, status, started_s)


def route_of(request: web.Request) -> str:
    """The path as the application has it, so that there are few."""
    resource = request.match_info.route.resource
    return NO_ROUTE if resource is None else resource.canonical


def _cut_off(record: RequestRecord) -> int:
    """The status of a request whose client closed; clients close a stream as soon as they have read its end."""
    if record.sent_status is not None:
        return record.sent_status
    if record.outcome == "answered":
        record.outcome = "client_left"
    return CLIENT_LEFT_STATUS


def log_refusal(request: web.BaseRequest, status: int) -> None:
    """One that the middlewares do not see: refused ahead of them."""
    record_of(request).outcome = "failed"
    _write(request, status, asyncio.get_running_loop().time())


def _write(request: web.BaseRequest, status: int, started_s: float) -> None:
    record = record_of(request)
    now_s = asyncio.get_running_loop().time()
    fields: dict[str, object] = {
        "method": request.method,
        "path": request.rel_url.raw_path[:MAX_PATH_CHARS],
        "status": status,
        "outcome": record.outcome,
        "duration_s": now_s - started_s,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "request": record.request_id,
    }
    if record.first_output_at is not None:
        fields["ttft_s"] = record.first_output_at - started_s
    fields.update(trace_fields(record.traceparent))
    log.info("request", extra=fields)
