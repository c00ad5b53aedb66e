"""The bodies and stream events of Anthropic's Messages API that the endpoint sends, as structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StopWord = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Usage(msgspec.Struct, frozen=True):
    """Unlike OpenAI's, `input_tokens` leaves out those that were read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""  # nothing here is encrypted


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    id: str
    model: str
    content: list[ContentBlock]
    usage: Usage
    stop_reason: StopWord | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    message: Message


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="type"):
    pass


class ContentBlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    thinking: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: StopWord
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    delta: StopDelta
    usage: Usage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    pass


StreamEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
