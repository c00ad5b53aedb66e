"""POST /v1/chat/completions: reads messages and renders them through the model's chat template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from dynrt.runtime.http.answers.answer import AnswerPlan
from dynrt.runtime.http.answers.plan import plan_answers, with_forced_calls
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.openai.chat_answer_reply import ChatAnswerReply
from dynrt.runtime.http.openai.chat_options import TemplateOptions, read_chat_options, read_template_options
from dynrt.runtime.http.openai.chat_reply import ChatReply
from dynrt.runtime.http.openai.conversation import MESSAGES
from dynrt.runtime.http.openai.replies import Reply, Shown
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.model_limits import (
    check_for_model,
    complete_sampling,
    special_tokens,
    truncated,
)
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response
from dynrt.runtime.http.serve import Job, make_job, serve, shown


class Conversation(msgspec.Struct, frozen=True):
    """What the chat template is given, checked."""

    messages: list[dict[str, Any]]
    options: TemplateOptions


class PreparedChat(msgspec.Struct, frozen=True):
    """What a reply needs to know of the chat that it answers. `prompt_ids`: packed."""

    prompt_ids: bytes
    shown: Shown
    plan: AnswerPlan


NewReply = Callable[[PreparedChat, str, int, str], Reply]  # the last three as in replies.MakeReply


def chat_completions(request: Request) -> Awaitable[Response | None]:
    return serve(request, _prepare)


async def _prepare(request: Request) -> Job:
    return await prepare_chat(request, Fields(await read_object(request), Problems()), _reply)


async def prepare_chat(request: Request, fields: Fields, new_reply: NewReply) -> Job:
    """The job for a body of this endpoint, or for one that another endpoint's body was read as."""
    messages, options = MESSAGES.read(fields), read_chat_options(fields)
    conversation = _conversation(fields, messages, options.template)
    fields.problems.raise_if_any()
    endpoint = request.endpoint
    backend = endpoint.backend
    asked, use = options.asked, options.template.tool_use
    card = find_model(backend, asked.model)
    if use is not None:
        asked = with_forced_calls(asked, use)
    await check_for_model(asked, card)
    prompt_ids = await encode_conversation(backend, conversation)
    prompt_ids = truncated(prompt_ids, asked, card, default_max_tokens=None)
    plan = await plan_answers(
        use, endpoint.answer_formats, backend, prompt_ids, has_grammar=asked.grammar is not None
    )
    sampling = complete_sampling(
        asked,
        card,
        len(prompt_ids) // 4,
        (*special_tokens(asked, backend), *plan.special_tokens),
        fields=fields,
        prompt_name="messages",
        default_max_tokens=None,
    )
    prepared = PreparedChat(prompt_ids, shown(asked, backend, options.logprobs), plan)
    return make_job(request, asked, card, [(prompt_ids, sampling)], partial(new_reply, prepared))


def encode_conversation(backend: Backend, conversation: Conversation) -> Coroutine[Any, Any, bytes]:
    """Packed ids of the prompt."""
    options = conversation.options
    use = options.tool_use
    return backend.encode_chat(
        conversation.messages,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        tools=None if use is None or use.choice == "none" else use.tools,
        template_kwargs=options.template_kwargs,
    )


def _reply(chat: PreparedChat, request_id: str, created: int, model: str) -> Reply:
    about = (f"chatcmpl-{request_id}", created, model, chat.shown, chat.prompt_ids)
    return ChatReply(*about) if chat.plan.is_plain else ChatAnswerReply(*about, chat.plan)


def read_conversation(fields: Fields) -> Conversation:
    """Problems are left with `fields`."""
    return _conversation(fields, MESSAGES.read(fields), read_template_options(fields))


def _conversation(fields: Fields, messages: list[dict[str, Any]], options: TemplateOptions) -> Conversation:
    if options.continue_final_message and messages and messages[-1].get("role") != "assistant":
        fields.refuse("continue_final_message", "it must be false, or the last message be the assistant's")
    return Conversation(messages, options)
