"""Answers requests: which handler serves which route, and what holds for every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import hdrs

from dynrt.runtime.errors import MethodNotAllowedError, RouteNotFoundError
from dynrt.runtime.http import models, not_built, openapi, probes, tokenize
from dynrt.runtime.http.access_log import CLIENT_LEFT_STATUS, MAX_PATH_CHARS, note_answer, status_of_cut_off
from dynrt.runtime.http.anthropic import endpoint as messages
from dynrt.runtime.http.body import check_headers
from dynrt.runtime.http.envelope import refuse, told_to_client
from dynrt.runtime.http.openai import chat, completions
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response
from dynrt.runtime.http.responses import endpoint as responses
from dynrt.runtime.http.transport.connection import ClientLeftError
from dynrt.runtime.http_counts import NO_ROUTE

Handler = Callable[[Request], Awaitable[Response | None]]  # None: the answer was a stream, which is out

ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/v1/models"): models.list_models,
    ("GET", models.MODEL_ROUTE): models.show_model,
    ("GET", "/health"): probes.health,
    ("GET", "/ping"): probes.health,
    ("GET", "/live"): probes.live,
    ("GET", "/ready"): probes.ready,
    ("GET", "/load"): probes.load,
    ("GET", "/version"): probes.show_version,
    ("GET", "/openapi.json"): openapi.show_openapi,
    ("GET", "/tokenizer_info"): tokenize.tokenizer_info,
    ("GET", "/metrics"): probes.metrics,
    ("POST", "/ping"): probes.health,
    ("POST", "/v1/chat/completions"): chat.chat_completions,
    ("POST", "/v1/completions"): completions.completions,
    ("POST", "/v1/responses"): responses.create_response,
    ("POST", "/v1/messages"): messages.create_message,
    ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
    ("POST", "/v1/embeddings"): not_built.embeddings,
    ("POST", "/tokenize"): tokenize.tokenize,
    ("POST", "/detokenize"): tokenize.detokenize,
}
PATHS = frozenset(path for _, path in ROUTES) - {models.MODEL_ROUTE}


async def answer(request: Request) -> Response | None:
    """What `request` gets, whatever comes of it; noted once it is known. None: it was a stream, which is out."""
    started_s = asyncio.get_running_loop().time()
    request.route = request.path if request.path in PATHS else _other_route(request.path)
    status = CLIENT_LEFT_STATUS
    try:
        handler = _handler_of(request)
        response = await handler(request)
        status = 200 if response is None else response.status
        return response
    except asyncio.CancelledError:
        status = status_of_cut_off(request.record)
        raise
    except Exception as error:
        response = refuse(request, told_to_client(error, request.record.request_id))
        status = response.status
        return response
    finally:
        note_answer(request, status, started_s)


def _handler_of(request: Request) -> Handler:
    """Who answers `request`. Raises what it lacks to be let in."""
    guard, method = request.endpoint.guard, request.method
    if method == "OPTIONS" and guard.is_preflight(request):
        return _allow_preflight
    guard.check(request)
    handler = ROUTES.get(("GET" if method == "HEAD" else method, request.route), _refuse_route)
    if hdrs.EXPECT in request.headers and handler is not _refuse_route:
        _ask_for_body(request)
    return handler


async def _allow_preflight(request: Request) -> Response:
    return Response(status=204)


def _other_route(path: str) -> str:
    names_model = path.startswith(models.MODEL_PREFIX) and path != models.MODEL_PREFIX
    return models.MODEL_ROUTE if names_model else NO_ROUTE


async def _refuse_route(request: Request) -> Response:
    path = request.raw_path[:MAX_PATH_CHARS]
    if request.route == NO_ROUTE:
        routes = ", ".join(sorted({*PATHS, models.MODEL_ROUTE}))
        return refuse(request, RouteNotFoundError(f"there is no {path} here; there are {routes}"))
    methods = {method for method, route in ROUTES if route == request.route}
    allowed = sorted(methods | {"HEAD"} if "GET" in methods else methods)
    response = refuse(
        request,
        MethodNotAllowedError(f"{path} does not take {request.method[:20]}; use {', '.join(allowed)}"),
    )
    response.headers["Allow"] = ",".join(allowed)
    return response


def _ask_for_body(request: Request) -> None:
    """Send `100 Continue` where it is expected, if the headers are acceptable.

    Other expectations are no reason to refuse a request.
    """
    if request.method == "POST":
        check_headers(request.headers)
    if request.is_http_1_1 and request.headers[hdrs.EXPECT].lower() == "100-continue":
        with suppress(ClientLeftError):  # which cancels this task in a moment
            request.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
