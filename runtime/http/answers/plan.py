"""Decides how the answers to a chat are read, by the tools it offers and the formats that its model writes."""

from __future__ import annotations

from functools import partial

import msgspec

from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.http.answers.answer import AnswerPlan, ReasoningPlan
from dynrt.runtime.http.answers.formats import AnswerFormats
from dynrt.runtime.http.answers.tools.forced import ForcedCallParser, ForcedListParser
from dynrt.runtime.http.answers.tools.formats import TOOL_FORMATS, ToolFormat
from dynrt.runtime.http.answers.tools.request import ToolUse, forced_calls
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.parameters.grammars import AskedGrammar
from dynrt.runtime.http.parameters.shared import Parameters

PROMPT_END_TOKENS = 16  # enough for a template's tags of reasoning
ALL_TEXT = AnswerPlan(TOOL_FORMATS["hermes"].new_call_id)


def with_forced_calls(asked: Parameters, use: ToolUse) -> Parameters:
    """`asked` with the grammar that makes the model call a tool, if one is required."""
    if use.choice != "required":
        return asked
    if asked.grammar is not None:
        raise InvalidRequestError(
            f"tool_choice requires a call, but {asked.grammar.param} wants another answer; leave one of them out",
            param="tool_choice",
        )
    return msgspec.structs.replace(asked, grammar=AskedGrammar(forced_calls(use), "tool_choice"))


async def plan_answers(
    use: ToolUse | None, formats: AnswerFormats, backend: Backend, prompt_ids: bytes, *, has_grammar: bool
) -> AnswerPlan:
    """How to read answers to `prompt_ids` (packed). One that follows a grammar has no reasoning.

    Raises InvalidRequestError if tools are offered and the model's format of calls is not known.
    """
    info = backend.tokenizer_info()
    reasoning = None if has_grammar else formats.of_reasoning(info.chat_template or "")
    plan = ALL_TEXT
    if use is not None and use.choice != "none":
        plan = _plan_calls(use, formats.of_tools(info.tool_template or info.chat_template or ""))
    if reasoning is None:
        return plan
    tail = prompt_ids[-4 * PROMPT_END_TOKENS :]
    prompt_end = await backend.decode(tail, skip_special_tokens=False)
    return msgspec.structs.replace(
        plan,
        reasoning=ReasoningPlan(reasoning, prompt_end, backend.token_bytes()),
        special_tokens=(*plan.special_tokens, reasoning.opening, reasoning.closing),
    )


def _plan_calls(use: ToolUse, tool_format: ToolFormat | None) -> AnswerPlan:
    new_call_id = (tool_format or TOOL_FORMATS["hermes"]).new_call_id
    if use.choice == "required":
        parser = ForcedListParser if use.named is None else ForcedCallParser
        return AnswerPlan(new_call_id, tools=partial(parser, use.names), parallel_calls=use.parallel_calls)
    if tool_format is None:
        raise InvalidRequestError(
            "tools are given, but the model's chat template shows no format of tool calls that is known here;"
            ' leave them out, set tool_choice to "none", or start the server with --tool-parser',
            param="tools",
        )
    return AnswerPlan(
        new_call_id,
        tools=partial(tool_format.parser, use.names),
        parallel_calls=use.parallel_calls,
        special_tokens=tool_format.tokens,
    )
