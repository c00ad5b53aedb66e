"""What load balancers, operators and scrapers ask: /health, /ping, /live, /ready, /load, /version, /metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

import msgspec
from aiohttp import web

from dynrt.runtime.errors import NoWorkerError, OverloadedError
from dynrt.runtime.http.access_log import HTTP_COUNTER
from dynrt.runtime.http.backend import BACKEND
from dynrt.runtime.http.models import json_response
from dynrt.runtime.http.open_requests import OPEN_REQUESTS

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VERSION = version("dynrt")


class Status(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class ServerLoad(msgspec.Struct, frozen=True):
    server_load: int


class Version(msgspec.Struct, frozen=True):
    version: str


async def health(request: web.Request) -> web.Response:
    """200 if and only if a request could be served from end to end."""
    return _served_from_end_to_end(request)


async def live(request: web.Request) -> web.Response:
    """200 as long as the process' event loop runs."""
    return json_response(Status())


async def ready(request: web.Request) -> web.Response:
    """200 if new requests should be sent here: not while loading, not while draining."""
    requests = request.app[OPEN_REQUESTS]
    if requests.ending or requests.draining or request.app[BACKEND].draining():
        raise OverloadedError("the server is draining and takes no new requests; use another server")
    return _served_from_end_to_end(request)


async def load(request: web.Request) -> web.Response:
    """How many generation requests are open here."""
    return json_response(ServerLoad(len(request.app[OPEN_REQUESTS])))


async def show_version(request: web.Request) -> web.Response:
    return json_response(Version(VERSION))


async def metrics(request: web.Request) -> web.Response:
    request.app[BACKEND].count_http(request.app[HTTP_COUNTER].take())
    return web.Response(body=await request.app[BACKEND].metrics(), headers={"Content-Type": METRICS_TYPE})


def _served_from_end_to_end(request: web.Request) -> web.Response:
    why_not = request.app[BACKEND].ready()
    if why_not is not None:
        raise NoWorkerError(f"not ready: {why_not}; try again later")
    return json_response(Status())
