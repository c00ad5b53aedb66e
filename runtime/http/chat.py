"""POST /v1/chat/completions: reads messages and renders them through the model's chat template."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from dynrt.runtime.http.backend import BACKEND
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.fields import Fields, Problems
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.parameters import complete_sampling, read_parameters
from dynrt.runtime.http.replies import ChatReply
from dynrt.runtime.http.serve import Job, make_job, serve
from dynrt.runtime.http.unsupported import CHAT, refuse_unsupported

MAX_MESSAGES = 10_000  # each takes the event loop some microseconds
ROLES = ("system", "developer", "user", "assistant")
OWN_TEMPLATE_NAMES = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
)  # given to the template by their own fields


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await serve(request, _prepare)


async def _prepare(request: web.Request) -> Job:
    fields = Fields(await read_object(request), Problems())
    messages = read_messages(fields)
    asked = read_parameters(fields)
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    template_kwargs = read_template_kwargs(fields)
    refuse_unsupported(fields, CHAT)
    fields.problems.raise_if_any()
    backend = request.app[BACKEND]
    card = find_model(backend, asked.model)
    prompt_ids = await backend.encode_chat(
        messages, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
    )
    sampling = complete_sampling(
        asked, card, len(prompt_ids) // 4, prompt_param="messages", default_max_tokens=None
    )
    return make_job(request, asked, card, [(prompt_ids, sampling)], ChatReply)


def read_template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = fields.child("chat_template_kwargs")
    for name in OWN_TEMPLATE_NAMES:
        if name in kwargs.values:
            kwargs.refuse(name, "it must be left out here: it is a field of the request itself")
    return kwargs.values


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages, checked; the prompt encoder gives them the form that the model's template wants."""
    messages = fields.values.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        fields.refuse("messages", f"it must be a list of at least one message and at most {MAX_MESSAGES}")
        return []
    return [
        _read_message(message, fields.problems, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def _read_message(value: object, problems: Problems, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        problems.add(path, f'{path} must be an object such as {{"role": "user", "content": "..."}}')
        return {}
    message = Fields(value, problems, path)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        message.refuse("role", f"it must be one of {', '.join(ROLES)}; tool messages are not supported yet")
        return {}
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            message.refuse(name, f"it must be left out: {name} is not supported yet")
    _check_content(message, role)
    return value


def _check_content(message: Fields, role: str) -> None:
    content = message.values.get("content")
    if isinstance(content, list) and content:
        for index, part in enumerate(content):
            _check_part(part, message.problems, f"{message.param('content')}[{index}]")
    elif not isinstance(content, str) and (content is not None or role != "assistant"):
        message.refuse("content", "it must be a string or a list of text parts")


def _check_part(value: object, problems: Problems, path: str) -> None:
    if not (isinstance(value, dict) and value.get("type") == "text" and isinstance(value.get("text"), str)):
        problems.add(
            path, f'{path} must be {{"type": "text", "text": "..."}}; other kinds of part are not supported'
        )
