"""What load balancers, operators and scrapers ask: /health, /ping, /live, /ready, /load, /version, /metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

import msgspec

from dynrt.runtime.errors import NoWorkerError, OverloadedError
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response, json_response

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VERSION = version("dynrt")


class Status(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class ServerLoad(msgspec.Struct, frozen=True):
    server_load: int


class Version(msgspec.Struct, frozen=True):
    version: str


async def health(request: Request) -> Response:
    """200 if and only if a request could be served from end to end."""
    return _served_from_end_to_end(request)


async def live(request: Request) -> Response:
    """200 as long as the process' event loop runs."""
    return json_response(Status())


async def ready(request: Request) -> Response:
    """200 if new requests should be sent here: not while loading, not while draining."""
    endpoint = request.endpoint
    requests = endpoint.open_requests
    if requests.ending or requests.draining or endpoint.backend.draining():
        raise OverloadedError("the server is draining and takes no new requests; use another server")
    return _served_from_end_to_end(request)


async def load(request: Request) -> Response:
    """How many generation requests are open here."""
    return json_response(ServerLoad(len(request.endpoint.open_requests)))


async def show_version(request: Request) -> Response:
    return json_response(Version(VERSION))


async def metrics(request: Request) -> Response:
    endpoint = request.endpoint
    endpoint.backend.count_http(endpoint.http_counter.take())
    return Response(await endpoint.backend.metrics(), media_type=METRICS_TYPE)


def _served_from_end_to_end(request: Request) -> Response:
    why_not = request.endpoint.backend.ready()
    if why_not is not None:
        raise NoWorkerError(f"not ready: {why_not}; try again later")
    return json_response(Status())
