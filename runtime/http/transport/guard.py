"""Lets a request in: by its API key, and by the web page that sends it (CORS)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynrt.runtime.http.transport.keys import ApiKeys

if TYPE_CHECKING:
    from dynrt.runtime.http.request import Request

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})  # load balancers have no key
PREFLIGHT_MAX_AGE_S = 600
ALLOWED_METHODS = "GET, POST, OPTIONS"
EXPOSED_HEADERS = "X-Request-Id, Retry-After"


class Guard:
    def __init__(
        self, keys: ApiKeys | None = None, origins: tuple[str, ...] = (), *, guard_metrics: bool = True
    ) -> None:
        self._keys = keys
        self._origins = frozenset(origins)
        self._open = OPEN_PATHS if guard_metrics else OPEN_PATHS | {"/metrics"}

    def check(self, request: Request) -> None:
        """Raises AuthenticationError if `request` lacks the key that its route wants."""
        if self._keys is not None and request.path not in self._open:
            self._keys.check(request.headers)

    def cors_lines(self, request: Request) -> str:
        """Headers that let the page read an answer, errors and streams too; never with credentials (cookies)."""
        if not self._origins:
            return ""
        if "*" in self._origins:
            lines = "Access-Control-Allow-Origin: *\r\n"
        elif self._is_from_allowed_page(request):
            lines = f"Vary: Origin\r\nAccess-Control-Allow-Origin: {request.headers['Origin']}\r\n"
        else:
            return "Vary: Origin\r\n"
        lines += f"Access-Control-Expose-Headers: {EXPOSED_HEADERS}\r\n"
        return lines + _preflight_lines(request) if self.is_preflight(request) else lines

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks what an allowed page may send; it does so without a key."""
        return (
            request.method == "OPTIONS"
            and "Access-Control-Request-Method" in request.headers
            and self._is_from_allowed_page(request)
        )

    def _is_from_allowed_page(self, request: Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and ("*" in self._origins or origin in self._origins)


def _preflight_lines(request: Request) -> str:
    # What it asks for is allowed: no header can do more than it could in any other client's request.
    asked = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
    return (
        f"Access-Control-Allow-Methods: {ALLOWED_METHODS}\r\n"
        f"Access-Control-Allow-Headers: {asked}\r\n"
        f"Access-Control-Max-Age: {PREFLIGHT_MAX_AGE_S}\r\n"
    )
