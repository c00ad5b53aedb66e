"""What a chat request says beside its messages: to the template, and about its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from dynrt.runtime.http.answers.tools.request import TOOL_PARAMETERS, ToolUse, asked_tool_use
from dynrt.runtime.http.openai.conversation import MESSAGES
from dynrt.runtime.http.parameters.fields import Fields
from dynrt.runtime.http.parameters.read_once import ReadOnce
from dynrt.runtime.http.parameters.request_schema import (
    Parameter,
    ParameterSet,
    body_schema,
    boolean,
    integer,
)
from dynrt.runtime.http.parameters.sampling import MAX_LOGPROBS
from dynrt.runtime.http.parameters.shared import ANSWERING, MAX_TOKENS, SHARED, Parameters, read_parameters
from dynrt.runtime.http.parameters.unsupported import CHAT, refuse_unsupported

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# given to the template by their own fields
OWN_TEMPLATE_NAMES = ("messages", "add_generation_prompt", "continue_final_message", "tools")


class TemplateOptions(msgspec.Struct, frozen=True):
    """What the chat template is given beside the messages."""

    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    tool_use: ToolUse | None


class ChatOptions(msgspec.Struct, frozen=True):
    """All of it. `logprobs`: how many alternatives are to be told with each token; None: no log probabilities."""

    template: TemplateOptions
    logprobs: int | None
    asked: Parameters


def read_template_options(fields: Fields) -> TemplateOptions:
    """Problems are left with `fields`."""
    return _template_options(fields, _OF_TEMPLATE_SET.read(fields))


def _read_chat_options(fields: Fields) -> ChatOptions:
    values = _ALL.read(fields)
    template = _template_options(fields, values)
    logprobs = _asked_logprobs(fields, values)
    asked = read_parameters(fields, values, max_tokens=values["max_tokens"], logprobs=logprobs)
    refuse_unsupported(fields, CHAT)
    return ChatOptions(template, logprobs, asked)


read_chat_options = ReadOnce(_read_chat_options, but=("messages", "user"))


def _template_options(fields: Fields, values: dict[str, Any]) -> TemplateOptions:
    continues, effort = values["continue_final_message"], values["reasoning_effort"]
    if continues and fields.values.get("add_generation_prompt") is True:
        fields.refuse("continue_final_message", "it must be false where add_generation_prompt is true")
    kwargs = {} if effort is None else {"reasoning_effort": effort}
    return TemplateOptions(
        add_generation_prompt=values["add_generation_prompt"] and not continues,
        continue_final_message=continues,
        template_kwargs=kwargs | values["chat_template_kwargs"],
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
_OF_TEMPLATE_SET = ParameterSet(_OF_TEMPLATE)
_ALL = ParameterSet((*_OF_TEMPLATE, *ANSWERING, *_OF_ANSWER))
CONVERSATION: tuple[Parameter[Any], ...] = (MESSAGES, *_OF_TEMPLATE)
PARAMETERS: tuple[Parameter[Any], ...] = (*CONVERSATION, *SHARED, *_OF_ANSWER)
CHAT_SCHEMA = body_schema("ChatCompletionRequest", "A conversation to go on with.", PARAMETERS)
