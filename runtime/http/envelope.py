"""Every error as the one nested envelope that OpenAI's clients read: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web

from dynrt.runtime.errors import (
    DynrtError,
    InvalidRequestError,
    MethodNotAllowedError,
    OverloadedError,
    RouteNotFoundError,
)
from dynrt.runtime.http.body import too_large

log = logging.getLogger("dynrt.http")

ROUTES = "/v1/chat/completions, /v1/completions, /v1/models, /health, /live, /ready, /version, /metrics"


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Envelope(msgspec.Struct, frozen=True):
    error: ErrorBody


def encode_error(error: DynrtError) -> bytes:
    """`error` as the JSON of a body or of a stream's last event."""
    return msgspec.json.encode(Envelope(ErrorBody(error.message, error.kind, error.param, error.code)))


def error_response(error: DynrtError) -> web.Response:
    """`error` as a whole response."""
    response = web.Response(status=error.status, body=encode_error(error), content_type="application/json")
    if isinstance(error, OverloadedError):
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def told_to_client(error: Exception, request_id: str) -> DynrtError:
    """What a client may know of `error`: a DynrtError as it is; of anything else, a bug, only where to look."""
    if isinstance(error, DynrtError):
        return error
    log.error("internal error in request %s", request_id, exc_info=error)
    return DynrtError(f"internal error; the server's log has it under request id {request_id}")


def http_error_response(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """One of aiohttp's own errors, in the envelope and with the headers (Allow) that it came with."""
    response = error_response(_from_aiohttp(error, request))
    response.set_status(error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _from_aiohttp(error: web.HTTPException, request: web.BaseRequest) -> DynrtError:
    path = request.rel_url.raw_path[:200]
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowedError(f"{path} does not take {request.method[:20]}; use {allowed}")
    if isinstance(error, web.HTTPNotFound):
        return RouteNotFoundError(f"there is no {path} here; there are {ROUTES}")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return too_large()
    return InvalidRequestError(f"the request cannot be served: {error.reason}")
