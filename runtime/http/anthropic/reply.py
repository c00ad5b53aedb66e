"""Puts an answer into the body or the stream events of Anthropic's Messages API; pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from dynrt.runtime.http.answers.answer import AnswerPlan
from dynrt.runtime.http.answers.blocks import Block, BlockNews, Blocks
from dynrt.runtime.http.anthropic import types as anthropic
from dynrt.runtime.http.openai.replies import finish_word
from dynrt.runtime.http.openai.types import Usage
from dynrt.runtime.http.sse import named_event
from dynrt.runtime.messages import Frame
from dynrt.runtime.requests import GenerateOutput

ID_PREFIX = "msg"


class MessagesReply:
    """For POST /v1/messages, which has one choice. Its text is told apart here, so it does not come in frames."""

    def __init__(self, message_id: str, model: str, plan: AnswerPlan) -> None:
        self._id = message_id
        self._model = model
        self._reader = plan.reader()
        self._blocks = Blocks(plan.new_call_id)
        self._stop: anthropic.StopDelta | None = None

    def frame(self, index: int) -> Frame | None:
        return None

    def events(self, index: int, output: GenerateOutput, *, first: bool, usage: Usage | UnsetType) -> bytes:
        assert usage is not UNSET, "a message's first event tells the length of its prompt"
        started = self._start(usage) if first else b""
        return started + b"".join(_told(news) for news in self._follow(output))

    def usage_event(self, usage: Usage) -> bytes:
        assert self._stop is not None, "the last output says why it is the last"
        end = anthropic.MessageDelta(self._stop, usage_of(usage))
        return named_event(end) + named_event(anthropic.MessageStop())

    def whole(self, outputs: Sequence[GenerateOutput], usage: Usage) -> anthropic.Message:
        [output] = outputs
        self._follow(output)
        assert self._stop is not None, "a whole output says why it ended"
        content = [_content(block) for block in self._blocks.all]
        return anthropic.Message(
            self._id, self._model, content, usage_of(usage), self._stop.stop_reason, self._stop.stop_sequence
        )

    def _follow(self, output: GenerateOutput) -> list[BlockNews]:
        finish = finish_word(output)
        news = self._blocks.follow(self._reader.read(output))
        if finish is not None:
            news += self._blocks.close()
            self._stop = _stop(output, has_calls=self._blocks.has_calls)
        return news

    def _start(self, usage: Usage) -> bytes:
        message = anthropic.Message(self._id, self._model, [], usage_of(usage))
        return named_event(anthropic.MessageStart(message)) + named_event(anthropic.Ping())


def usage_of(usage: Usage) -> anthropic.Usage:
    cached = usage.prompt_tokens_details.cached_tokens
    return anthropic.Usage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _stop(output: GenerateOutput, *, has_calls: bool) -> anthropic.StopDelta:
    if output.finish_reason == "length":
        return anthropic.StopDelta("max_tokens", None)
    if has_calls:
        return anthropic.StopDelta("tool_use", None)
    if isinstance(output.stop_reason, str):
        return anthropic.StopDelta("stop_sequence", output.stop_reason)
    return anthropic.StopDelta("end_turn", None)


def _told(news: BlockNews) -> bytes:
    block = news.block
    match news.what:
        case "opened":
            return named_event(anthropic.ContentBlockStart(block.index, _empty(block)))
        case "grown":
            return named_event(anthropic.ContentBlockDelta(block.index, _delta(block, news.piece)))
        case "closed":
            return named_event(anthropic.ContentBlockStop(block.index))


def _empty(block: Block) -> anthropic.ContentBlock:
    return _content(Block(block.index, block.kind, block.name, block.call_id))


def _delta(
    block: Block, piece: str
) -> anthropic.TextDelta | anthropic.ThinkingDelta | anthropic.InputJsonDelta:
    match block.kind:
        case "reasoning":
            return anthropic.ThinkingDelta(piece)
        case "text":
            return anthropic.TextDelta(piece)
        case "call":
            return anthropic.InputJsonDelta(piece)


def _content(block: Block) -> anthropic.ContentBlock:
    match block.kind:
        case "reasoning":
            return anthropic.ThinkingBlock(block.content)
        case "text":
            return anthropic.TextBlock(block.content)
        case "call":
            return anthropic.ToolUseBlock(block.call_id, block.name, _input(block.content))


def _input(arguments: str) -> dict[str, Any]:
    """The API has no way to tell arguments that were broken off: they are none then."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
