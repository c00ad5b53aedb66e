"""POST /v1/responses: OpenAI's Responses API, stateless. A response is answered as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

import msgspec

from dynrt.runtime.errors import DynrtError
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.envelope import Envelope, error_body
from dynrt.runtime.http.openai.chat import PreparedChat, prepare_chat
from dynrt.runtime.http.openai.replies import Reply
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response
from dynrt.runtime.http.responses.input import OWN_NAMES, chat_body, echo_of
from dynrt.runtime.http.responses.reply import ID_PREFIX, ResponsesReply
from dynrt.runtime.http.responses.types import Echo
from dynrt.runtime.http.serve import Job, serve
from dynrt.runtime.http.sse import Ending, named_event


class Failed(Envelope, frozen=True, tag="error", tag_field="type"):
    """An error in a stream: flat as the API has it, and nested as OpenAI's clients look for it."""

    message: str
    code: str | None
    param: str | None


def _failed(error: DynrtError, request_id: str) -> bytes:
    return named_event(Failed(error_body(error), error.message, error.code, error.param))


ENDING = Ending(last=b"", failure=_failed)


def create_response(request: Request) -> Awaitable[Response | None]:
    return serve(request, _prepare, ENDING)


async def _prepare(request: Request) -> Job:
    fields = Fields(await read_object(request), Problems())
    body = chat_body(fields)
    fields.problems.raise_if_any()
    chat = Fields(body, fields.problems, names=OWN_NAMES)
    job = await prepare_chat(request, chat, partial(_reply, echo_of(fields.values)))
    return msgspec.structs.replace(job, include_usage=True)


def _reply(echo: Echo, chat: PreparedChat, request_id: str, created: int, model: str) -> Reply:
    return ResponsesReply(f"{ID_PREFIX}_{request_id}", created, model, chat.plan, echo)
