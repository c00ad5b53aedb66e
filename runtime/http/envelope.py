"""Every error in the nested envelope that OpenAI's clients read, or in Anthropic's on the routes of theirs."""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from dynrt.runtime.errors import (
    AuthenticationError,
    DynrtError,
    OverloadedError,
)
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response

log = logging.getLogger("dynrt.http")

ANTHROPIC_ROUTES = "/v1/messages"  # this path and those below it
ANTHROPIC_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


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


def refuse(request: Request, error: DynrtError) -> Response:
    """Answer `request` with `error`, in the shape that clients of its route read."""
    request.record.outcome = "failed"
    body = encode_error(error)
    if request.path == ANTHROPIC_ROUTES or request.path.startswith(ANTHROPIC_ROUTES + "/"):
        body = encode_anthropic_error(error, request.record.request_id)
    response = Response(body, error.status)
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
