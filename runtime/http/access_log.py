"""One JSON line per request on the logger `dynrt.http`; never a prompt, nothing for probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from dynrt.runtime.http.request_record import Outcome, record_of

log = logging.getLogger("dynrt.http")

QUIET_PATHS = frozenset({"/health", "/live", "/ready", "/metrics"})
CLIENT_LEFT_STATUS = 499  # nginx's number for a client that closed before it was answered; never sent
MAX_PATH_CHARS = 200

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AccessLine(msgspec.Struct, frozen=True):
    method: str
    path: str
    status: int
    outcome: Outcome
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    request_id: str


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
        if record_of(request).outcome == "answered":
            record_of(request).outcome = "client_left"
        raise
    finally:
        if request.path not in QUIET_PATHS:
            _write(request, status, asyncio.get_running_loop().time() - started_s)


def _write(request: web.Request, status: int, duration_s: float) -> None:
    record = record_of(request)
    line = AccessLine(
        method=request.method,
        path=request.rel_url.raw_path[:MAX_PATH_CHARS],
        status=status,
        outcome=record.outcome,
        duration_s=round(duration_s, 6),
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        request_id=record.request_id,
    )
    log.info("%s", msgspec.json.encode(line).decode())
