"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API. A message is answered as the chat it asks for."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec

from dynrt.runtime.errors import DynrtError
from dynrt.runtime.http.anthropic.input import OWN_NAMES, chat_body
from dynrt.runtime.http.anthropic.reply import ID_PREFIX, MessagesReply
from dynrt.runtime.http.anthropic.types import TokenCount
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.envelope import encode_anthropic_error
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.openai.chat import PreparedChat, encode_conversation, prepare_chat, read_conversation
from dynrt.runtime.http.openai.replies import Reply
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.shared import MODEL
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response, json_response
from dynrt.runtime.http.serve import Job, serve
from dynrt.runtime.http.sse import Ending, data_event


def _failed(error: DynrtError, request_id: str) -> bytes:
    return b"event: error\n" + data_event(encode_anthropic_error(error, request_id))


ENDING = Ending(last=b"", failure=_failed)


def create_message(request: Request) -> Awaitable[Response | None]:
    return serve(request, _prepare, ENDING)


async def _prepare(request: Request) -> Job:
    chat = await _read_chat(request, wants_answer=True)
    job = await prepare_chat(request, chat, _reply)
    return msgspec.structs.replace(job, include_usage=True, continuous_usage=True)  # the first event has some


async def count_tokens(request: Request) -> Response:
    chat = await _read_chat(request, wants_answer=False)
    conversation, model = read_conversation(chat), MODEL.read(chat)
    chat.problems.raise_if_any()
    backend = request.endpoint.backend
    find_model(backend, model)
    prompt_ids = await encode_conversation(backend, conversation)
    return json_response(TokenCount(len(prompt_ids) // 4))


async def _read_chat(request: Request, *, wants_answer: bool) -> Fields:
    fields = Fields(await read_object(request), Problems())
    body = chat_body(fields, wants_answer=wants_answer)
    fields.problems.raise_if_any()
    return Fields(body, fields.problems, names=OWN_NAMES)


def _reply(chat: PreparedChat, request_id: str, created: int, model: str) -> Reply:
    return MessagesReply(f"{ID_PREFIX}_{request_id}", model, chat.plan)
