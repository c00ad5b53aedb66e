"""Lets a request in: by its API key, and by the web page that sends it (CORS)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from dynrt.runtime.http.transport.keys import ApiKeys

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})  # load balancers have no key
PREFLIGHT_MAX_AGE_S = 600
ALLOWED_METHODS = "GET, POST, OPTIONS"
EXPOSED_HEADERS = "X-Request-Id, Retry-After"


class Guard:
    """`admit` is a middleware; `check` is for what comes ahead of the middlewares."""

    def __init__(
        self, keys: ApiKeys | None = None, origins: tuple[str, ...] = (), *, guard_metrics: bool = True
    ) -> None:
        self._keys = keys
        self._origins = frozenset(origins)
        self._open = OPEN_PATHS if guard_metrics else OPEN_PATHS | {"/metrics"}

    def check(self, request: web.Request) -> None:
        """Raises AuthenticationError if `request` lacks the key that its route wants."""
        if self._keys is not None and request.path not in self._open:
            self._keys.check(request.headers)

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._is_preflight(request):  # browsers send it without a key
            return web.Response(status=204)
        self.check(request)
        return await handler(request)

    def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page read this response, errors and streams too; never with credentials (cookies)."""
        if not self._origins:
            return
        headers = response.headers
        if "*" in self._origins:
            headers["Access-Control-Allow-Origin"] = "*"
        else:
            headers.add("Vary", "Origin")
            if not self._is_from_allowed_page(request):
                return
            headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
        headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
        if self._is_preflight(request):
            headers["Access-Control-Allow-Methods"] = ALLOWED_METHODS
            asked = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
            headers["Access-Control-Allow-Headers"] = asked  # none can do more than any other client's
            headers["Access-Control-Max-Age"] = str(PREFLIGHT_MAX_AGE_S)

    def _is_preflight(self, request: web.Request) -> bool:
        return (
            request.method == "OPTIONS"
            and "Access-Control-Request-Method" in request.headers
            and self._is_from_allowed_page(request)
        )

    def _is_from_allowed_page(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and ("*" in self._origins or origin in self._origins)


GUARD = web.AppKey("guard", Guard)
