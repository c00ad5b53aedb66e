"""POST /v1/completions: continues prompts, each given as text or as token ids."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any

import msgspec

from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.openai.replies import Reply, Shown
from dynrt.runtime.http.openai.text_reply import TextPrompt, TextReply
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.fields import shown as quoted
from dynrt.runtime.http.parameters.model_limits import (
    check_for_model,
    check_vocabulary,
    complete_sampling,
    special_tokens,
    truncated,
)
from dynrt.runtime.http.parameters.read_once import ReadOnce
from dynrt.runtime.http.parameters.request_schema import (
    Parameter,
    ParameterSet,
    body_schema,
    boolean,
    integer,
)
from dynrt.runtime.http.parameters.sampling import MAX_LOGPROBS, are_token_ids
from dynrt.runtime.http.parameters.shared import (
    ANSWERING,
    MAX_CHOICES,
    MAX_TOKENS,
    SHARED,
    Parameters,
    read_parameters,
)
from dynrt.runtime.http.parameters.unsupported import COMPLETIONS, refuse_unsupported
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response
from dynrt.runtime.http.serve import Job, make_job, serve, shown
from dynrt.runtime.messages import pack_ids
from dynrt.runtime.requests import ModelCard

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


class TextOptions(msgspec.Struct, frozen=True):
    """What a body says beside its prompts. `logprobs`: how many alternatives per token; None: no log probabilities."""

    echo: bool
    logprobs: int | None
    add_special_tokens: bool
    asked: Parameters


def _read_text_options(fields: Fields) -> TextOptions:
    values = _ALL.read(fields)
    echo, logprobs = values["echo"], values["logprobs"]
    asked = read_parameters(
        fields,
        values,
        max_tokens=(MAX_TOKENS_WITH_ECHO if echo else MAX_TOKENS).read(fields),
        logprobs=logprobs,
        echo_logprobs=logprobs if echo else None,
    )
    refuse_unsupported(fields, COMPLETIONS)
    return TextOptions(echo, logprobs, values["add_special_tokens"], asked)


read_text_options = ReadOnce(_read_text_options, but=("prompt", "user"))


def completions(request: Request) -> Awaitable[Response | None]:
    return serve(request, _prepare)


async def _prepare(request: Request) -> Job:
    fields = Fields(await read_object(request), Problems())
    prompts, options = PROMPT.read(fields), read_text_options(fields)
    asked = options.asked
    _check_choices(fields, len(prompts), asked.n)
    fields.problems.raise_if_any()
    backend = request.endpoint.backend
    card = find_model(backend, asked.model)
    await check_for_model(asked, card)
    special = special_tokens(asked, backend)
    whole = [await _prompt_ids(backend, card, prompt, options.add_special_tokens) for prompt in prompts]
    packed = [truncated(ids, asked, card, default_max_tokens=DEFAULT_MAX_TOKENS) for ids in whole]
    completed = [
        complete_sampling(
            asked,
            card,
            len(ids) // 4,
            special,
            fields=fields,
            prompt_name="prompt",
            default_max_tokens=DEFAULT_MAX_TOKENS,
        )
        for ids in packed
    ]
    echoes = [
        await _echo(backend, *one) if options.echo else None
        for one in zip(prompts, whole, packed, strict=True)
    ]
    texts = [TextPrompt(ids, text) for ids, text in zip(packed, echoes, strict=True)]
    make_reply = partial(_reply, shown(asked, backend, options.logprobs), texts, asked.n)
    return make_job(request, asked, card, list(zip(packed, completed, strict=True)), make_reply)


def _reply(
    shows: Shown, prompts: list[TextPrompt], n: int, request_id: str, created: int, model: str
) -> Reply:
    return TextReply(f"cmpl-{request_id}", created, model, shows, prompts, n)


def read_prompts(fields: Fields) -> list[Prompt]:
    """One prompt or a list of them, each a string or a list of token ids; none if they are refused."""
    prompt: Any = fields.values.get("prompt")
    is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if is_batch else [prompt]
    if len(prompts) > MAX_CHOICES:
        fields.refuse("prompt", f"it must be at most {MAX_CHOICES} prompts")
        return []
    for index, one in enumerate(prompts):
        if not _is_prompt(one):
            param = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
            rule = "it must be a string or a list of token ids, not empty and no id negative"
            fields.problems.add(param, f"{param} is {quoted(one)}; {rule}")
    return prompts


def _is_prompt(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (isinstance(value, list) and are_token_ids(value)))


def _check_choices(fields: Fields, num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        fields.refuse("n", f"it must be at most {MAX_CHOICES // num_prompts} with {num_prompts} prompts")


def _read_logprobs(fields: Fields) -> int | None:
    if fields.values.get("logprobs") is False:  # chat's way to ask for none
        return None
    return fields.integer("logprobs", None, 0, MAX_LOGPROBS)


async def _prompt_ids(backend: Backend, card: ModelCard, prompt: Prompt, add_special_tokens: bool) -> bytes:
    if isinstance(prompt, str):
        return await backend.encode(prompt, add_special_tokens=add_special_tokens)
    check_vocabulary(prompt, card, "prompt")
    return pack_ids(prompt)


async def _echo(backend: Backend, prompt: Prompt, whole: bytes, packed: bytes) -> str:
    """The text of the tokens that are used: of all, the prompt's own."""
    return prompt if isinstance(prompt, str) and packed == whole else await backend.decode(packed)


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_BATCH = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"anyOf": [_TEXT, _IDS]}}
PROMPT = Parameter[list[Prompt]](
    "prompt",
    "Text or token ids, or a list of such prompts. Choice i of prompt p has the index p * n + i.",
    {"anyOf": [_TEXT, _IDS, _BATCH]},
    read_prompts,
    [],
    required=True,
)
ECHO = boolean("echo", "Answer with the prompt and what follows it.", False)
MAX_TOKENS_WITH_ECHO = integer(
    "max_tokens", f"The most tokens of an answer, 0 only with echo; by default {DEFAULT_MAX_TOKENS}.", None, 0
)
LOGPROBS = Parameter[int | None](
    "logprobs",
    "Log probabilities of the answer's tokens, with echo of the prompt's too, and of so many alternatives.",
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}, {"enum": [False, None]}]},
    _read_logprobs,
    None,
)
ADD_SPECIAL_TOKENS = boolean("add_special_tokens", "Begin the prompt's ids as the tokenizer does.", True)

_OWN = (ECHO, LOGPROBS, ADD_SPECIAL_TOKENS)
_ALL = ParameterSet((*ANSWERING, *_OWN))
PARAMETERS: tuple[Parameter[Any], ...] = (PROMPT, *SHARED, MAX_TOKENS_WITH_ECHO, *_OWN)
COMPLETION_SCHEMA = body_schema("CompletionRequest", "Text to go on with.", PARAMETERS)
