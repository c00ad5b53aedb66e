"""What all requests of one endpoint share."""

from __future__ import annotations

from dynrt.runtime.http.answers.formats import AnswerFormats
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.open_requests import OpenRequests
from dynrt.runtime.http.transport.guard import Guard
from dynrt.runtime.http_counts import HttpCounter


class Endpoint:
    """One per server."""

    __slots__ = ("answer_formats", "backend", "guard", "http_counter", "open_requests")

    def __init__(
        self, backend: Backend, guard: Guard | None = None, answer_formats: AnswerFormats | None = None
    ) -> None:
        self.backend = backend
        self.guard = guard if guard is not None else Guard()
        self.answer_formats = answer_formats if answer_formats is not None else AnswerFormats()
        self.open_requests = OpenRequests()
        self.http_counter = HttpCounter()
