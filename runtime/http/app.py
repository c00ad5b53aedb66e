"""The aiohttp application: routes, and what holds for every response."""

from __future__ import annotations

from aiohttp import HttpVersion11, hdrs, web

from dynrt.runtime.errors import DynrtError
from dynrt.runtime.http import models, not_built, openapi, probes, tokenize
from dynrt.runtime.http.access_log import HTTP_COUNTER, Handler, log_access, log_refusal, route_of
from dynrt.runtime.http.answers.formats import ANSWER_FORMATS, AnswerFormats
from dynrt.runtime.http.anthropic import endpoint as messages
from dynrt.runtime.http.backend import BACKEND, Backend
from dynrt.runtime.http.body import MAX_BODY_BYTES, check_headers
from dynrt.runtime.http.envelope import error_response, http_error_response, told_to_client
from dynrt.runtime.http.open_requests import OPEN_REQUESTS, OpenRequests
from dynrt.runtime.http.openai import chat, completions
from dynrt.runtime.http.request_record import X_REQUEST_ID, record_of
from dynrt.runtime.http.responses import endpoint as responses
from dynrt.runtime.http.transport.guard import GUARD, Guard
from dynrt.runtime.http_counts import HttpCounter

GET_ROUTES: dict[str, Handler] = {
    "/v1/models": models.list_models,
    "/v1/models/{model:.+}": models.show_model,
    "/health": probes.health,
    "/ping": probes.health,
    "/live": probes.live,
    "/ready": probes.ready,
    "/load": probes.load,
    "/version": probes.show_version,
    "/openapi.json": openapi.show_openapi,
    "/tokenizer_info": tokenize.tokenizer_info,
    "/metrics": probes.metrics,
}
POST_ROUTES: dict[str, Handler] = {
    "/ping": probes.health,
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/responses": responses.create_response,
    "/v1/messages": messages.create_message,
    "/v1/messages/count_tokens": messages.count_tokens,
    "/v1/embeddings": not_built.embeddings,
    "/tokenize": tokenize.tokenize,
    "/detokenize": tokenize.detokenize,
}


def create_app(
    backend: Backend, guard: Guard | None = None, answer_formats: AnswerFormats | None = None
) -> web.Application:
    """The endpoint in front of `backend`; serve it with `handler_cancellation`, as HttpServer does."""
    guard = guard if guard is not None else Guard()
    middlewares = [log_access, answer_errors, guard.admit]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app[GUARD] = guard
    app[BACKEND] = backend
    app[ANSWER_FORMATS] = answer_formats if answer_formats is not None else AnswerFormats()
    app[OPEN_REQUESTS] = OpenRequests()
    app[HTTP_COUNTER] = HttpCounter()
    app.on_response_prepare.append(_complete_headers)
    _add_routes(app.router)
    return app


def _add_routes(router: web.UrlDispatcher) -> None:
    for path, handler in GET_ROUTES.items():
        router.add_get(path, handler, expect_handler=_answer_expect)
    for path, handler in POST_ROUTES.items():
        router.add_post(path, handler, expect_handler=_answer_expect)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises, and aiohttp's own 404 and 405, into the error envelope."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        record_of(request).outcome = "failed"
        return http_error_response(error, request)
    except Exception as error:
        record = record_of(request)
        record.outcome = "failed"
        return error_response(told_to_client(error, record.request_id), request)


async def _answer_expect(request: web.Request) -> web.StreamResponse | None:
    """Ask for the body of a request with `Expect: 100-continue` only if its headers are acceptable.

    aiohttp calls this ahead of the middlewares. Other expectations are no reason to refuse a request.
    """
    try:
        request.app[GUARD].check(request)
        if request.method == "POST":
            check_headers(request)
    except DynrtError as error:
        request.app[HTTP_COUNTER].answered(route_of(request), error.status)
        log_refusal(request, error.status)
        return error_response(error, request)
    if request.version >= HttpVersion11 and request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # aiohttp counts what belongs to the response from here
    return None


async def _complete_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Here, as the headers of a stream are out before a middleware sees its response."""
    headers = response.headers
    headers[X_REQUEST_ID] = record_of(request).request_id
    headers[hdrs.SERVER] = "dynrt"
    app = request.app
    app[GUARD].add_cors_headers(request, response)
    if app[OPEN_REQUESTS].ending:
        headers[hdrs.CONNECTION] = "close"
        response.force_close()
