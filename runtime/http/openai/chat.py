"""POST /v1/chat/completions: reads messages and renders them through the model's chat template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from dynrt.runtime.http.answers.answer import AnswerPlan
from dynrt.runtime.http.answers.plan import plan_answers, with_forced_calls
from dynrt.runtime.http.answers.tools.request import TOOL_PARAMETERS, ToolUse, asked_tool_use
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.openai.chat_answer_reply import ChatAnswerReply
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
from dynrt.runtime.http.parameters.request_schema import (
    Parameter,
    ParameterSet,
    body_schema,
    boolean,
    integer,
)
from dynrt.runtime.http.parameters.sampling import MAX_LOGPROBS
from dynrt.runtime.http.parameters.shared import ANSWERING, MAX_TOKENS, SHARED, read_parameters
from dynrt.runtime.http.parameters.unsupported import CHAT, refuse_unsupported
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response
from dynrt.runtime.http.serve import Job, make_job, serve, shown

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# given to the template by their own fields
OWN_TEMPLATE_NAMES = ("messages", "add_generation_prompt", "continue_final_message", "tools")


class Conversation(msgspec.Struct, frozen=True):
    """What the chat template is given."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    tool_use: ToolUse | None


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
    messages, values = MESSAGES.read(fields), _OPTIONS.read(fields)
    conversation = _conversation(fields, messages, values)
    logprobs = _asked_logprobs(fields, values)
    asked = read_parameters(fields, values, max_tokens=values["max_tokens"], logprobs=logprobs)
    refuse_unsupported(fields, CHAT)
    fields.problems.raise_if_any()
    endpoint = request.endpoint
    backend = endpoint.backend
    card = find_model(backend, asked.model)
    use = conversation.tool_use
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
        prompt_param=fields.param("messages"),
        default_max_tokens=None,
    )
    prepared = PreparedChat(prompt_ids, shown(asked, backend, logprobs), plan)
    return make_job(request, asked, card, [(prompt_ids, sampling)], partial(new_reply, prepared))


def encode_conversation(backend: Backend, conversation: Conversation) -> Coroutine[Any, Any, bytes]:
    """Packed ids of the prompt."""
    use = conversation.tool_use
    return backend.encode_chat(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        tools=None if use is None or use.choice == "none" else use.tools,
        template_kwargs=conversation.template_kwargs,
    )


def _reply(chat: PreparedChat, request_id: str, created: int, model: str) -> Reply:
    about = (f"chatcmpl-{request_id}", created, model, chat.shown, chat.prompt_ids)
    return ChatReply(*about) if chat.plan.is_plain else ChatAnswerReply(*about, chat.plan)


def read_conversation(fields: Fields) -> Conversation:
    """Problems are left with `fields`."""
    return _conversation(fields, MESSAGES.read(fields), _CONVERSATION_OPTIONS.read(fields))


def _conversation(fields: Fields, messages: list[dict[str, Any]], values: dict[str, Any]) -> Conversation:
    """`values`: those of CONVERSATION, but for the messages."""
    continues, effort = values["continue_final_message"], values["reasoning_effort"]
    if continues and fields.values.get("add_generation_prompt") is True:
        fields.refuse("continue_final_message", "it must be false where add_generation_prompt is true")
    if continues and messages and messages[-1].get("role") != "assistant":
        fields.refuse("continue_final_message", "it must be false, or the last message be the assistant's")
    return Conversation(
        messages,
        add_generation_prompt=values["add_generation_prompt"] and not continues,
        continue_final_message=continues,
        template_kwargs=({} if effort is None else {"reasoning_effort": effort})
        | values["chat_template_kwargs"],
        tool_use=asked_tool_use(fields, values),
    )


def read_template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = fields.child("chat_template_kwargs")
    for name in OWN_TEMPLATE_NAMES:
        if name in kwargs.values:
            kwargs.refuse(name, "it must be left out here: it is a field of the request itself")
    return kwargs.values


def _asked_logprobs(fields: Fields, values: dict[str, Any]) -> int | None:
    """How many alternatives are to be told with each token; None: no log probabilities."""
    wanted, top = values["logprobs"], values["top_logprobs"]
    if top and not wanted:
        fields.refuse("top_logprobs", "it must be left out, or logprobs be true")
    return top if wanted else None


def _read_reasoning_effort(fields: Fields) -> str | None:
    effort = fields.values["reasoning_effort"]
    if effort in REASONING_EFFORTS:
        return str(effort)
    fields.refuse("reasoning_effort", f"it must be one of {', '.join(REASONING_EFFORTS)}")
    return None


LOGPROBS = boolean("logprobs", "Log probabilities of the answer's tokens.", False)
TOP_LOGPROBS = integer("top_logprobs", "With logprobs: so many alternatives per token.", 0, 0, MAX_LOGPROBS)
ADD_GENERATION_PROMPT = boolean("add_generation_prompt", "End the prompt with what begins an answer.", True)
CONTINUE_FINAL_MESSAGE = boolean(
    "continue_final_message", "Go on with the last message, the assistant's, instead of a new one.", False
)
TEMPLATE_KWARGS = Parameter[dict[str, Any]](
    "chat_template_kwargs",
    "Further variables of the model's chat template.",
    {"type": ["object", "null"]},
    read_template_kwargs,
    {},
)
REASONING_EFFORT = Parameter[str | None](
    "reasoning_effort",
    "A variable of the chat template; not all heed it.",
    {"enum": [*REASONING_EFFORTS, None]},
    _read_reasoning_effort,
    None,
)

_OF_TEMPLATE: tuple[Parameter[Any], ...] = (
    ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, TEMPLATE_KWARGS, REASONING_EFFORT, *TOOL_PARAMETERS,
)  # fmt: skip
_OF_ANSWER = (MAX_TOKENS, LOGPROBS, TOP_LOGPROBS)
_CONVERSATION_OPTIONS = ParameterSet(_OF_TEMPLATE)
_OPTIONS = ParameterSet((*_OF_TEMPLATE, *ANSWERING, *_OF_ANSWER))
CONVERSATION: tuple[Parameter[Any], ...] = (MESSAGES, *_OF_TEMPLATE)
PARAMETERS: tuple[Parameter[Any], ...] = (*CONVERSATION, *SHARED, *_OF_ANSWER)
CHAT_SCHEMA = body_schema("ChatCompletionRequest", "A conversation to go on with.", PARAMETERS)
