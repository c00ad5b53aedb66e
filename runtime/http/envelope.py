"""Every error in the nested envelope that OpenAI's clients read, or in Anthropic's on the routes of theirs."""

from __future__ import annotations

import logging
from typing import Literal

import msgspec
from aiohttp import web

from dynrt.runtime.errors import (
    AuthenticationError,
    DynrtError,
    InvalidRequestError,
    MethodNotAllowedError,
    OverloadedError,
    RouteNotFoundError,
)
from dynrt.runtime.http.body import too_large
from dynrt.runtime.http.request_record import record_of

log = logging.getLogger("dynrt.http")

ANTHROPIC_ROUTES = "/v1/messages"  # this path and those below it
ANTHROPIC_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
MAX_PATH_CHARS = 200


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Envelope(msgspec.Struct, frozen=True):
    """OpenAI's."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicEnvelope(msgspec.Struct, frozen=True):
    error: AnthropicErrorBody
    request_id: str
    type: Literal["error"] = "error"


def encode_error(error: DynrtError) -> bytes:
    """`error` as the JSON of a body or of a stream's last event, in OpenAI's shape."""
    return msgspec.json.encode(Envelope(error_body(error)))


def error_body(error: DynrtError) -> ErrorBody:
    return ErrorBody(error.message, error.kind, error.param, error.code)


def encode_anthropic_error(error: DynrtError, request_id: str) -> bytes:
    """The same in Anthropic's shape, which has no `param`: our messages name it."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    if error.status >= 500:
        kind = "overloaded_error" if isinstance(error, OverloadedError) else "api_error"
    return msgspec.json.encode(AnthropicEnvelope(AnthropicErrorBody(kind, error.message), request_id))


def error_response(error: DynrtError, request: web.BaseRequest) -> web.Response:
    """`error` as a whole response, in the shape that clients of this route read."""
    body = encode_error(error)
    if request.path == ANTHROPIC_ROUTES or request.path.startswith(ANTHROPIC_ROUTES + "/"):
        body = encode_anthropic_error(error, record_of(request).request_id)
    response = web.Response(status=error.status, body=body, content_type="application/json")
    if isinstance(error, OverloadedError):
        response.headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, AuthenticationError):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def told_to_client(error: Exception, request_id: str) -> DynrtError:
    """What a client may know of `error`: a DynrtError as it is; of anything else, a bug, only where to look."""
    if isinstance(error, DynrtError):
        return error
    log.error("internal error in request %s", request_id, exc_info=error)
    return DynrtError(f"internal error; the server's log has it under request id {request_id}")


def http_error_response(error: web.HTTPException, request: web.Request) -> web.Response:
    """One of aiohttp's own errors, in the envelope and with the headers (Allow) that it came with."""
    response = error_response(_from_aiohttp(error, request), request)
    response.set_status(error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _from_aiohttp(error: web.HTTPException, request: web.Request) -> DynrtError:
    path = request.rel_url.raw_path[:MAX_PATH_CHARS]
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowedError(f"{path} does not take {request.method[:20]}; use {allowed}")
    if isinstance(error, web.HTTPNotFound):
        routes = ", ".join(sorted({route.canonical for route in request.app.router.resources()}))
        return RouteNotFoundError(f"there is no {path} here; there are {routes}")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return too_large()
    return InvalidRequestError(f"the request cannot be served: {error.reason}")
