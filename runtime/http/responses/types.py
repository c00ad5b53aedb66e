"""The bodies and stream events of OpenAI's Responses API that the endpoint sends, as structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


ContentPart = OutputText | ReasoningText


class MessageItem(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: tuple[()] = ()


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call", tag_field="type"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request, as it was given there."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    temperature: float = 1.0
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float = 1.0


class Response(Echo, frozen=True, kw_only=True, tag="response", tag_field="object"):
    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    error: None = None
    previous_response_id: None = None
    background: bool = False
    store: bool = False
    truncation: Literal["disabled"] = "disabled"


class ResponseCreated(msgspec.Struct, frozen=True, tag="response.created", tag_field="type"):
    sequence_number: int
    response: Response


class ResponseInProgress(msgspec.Struct, frozen=True, tag="response.in_progress", tag_field="type"):
    sequence_number: int
    response: Response


class ResponseCompleted(msgspec.Struct, frozen=True, tag="response.completed", tag_field="type"):
    sequence_number: int
    response: Response


class ResponseIncomplete(msgspec.Struct, frozen=True, tag="response.incomplete", tag_field="type"):
    sequence_number: int
    response: Response


class OutputItemAdded(msgspec.Struct, frozen=True, tag="response.output_item.added", tag_field="type"):
    sequence_number: int
    output_index: int
    item: OutputItem


class OutputItemDone(msgspec.Struct, frozen=True, tag="response.output_item.done", tag_field="type"):
    sequence_number: int
    output_index: int
    item: OutputItem


class OfItem(msgspec.Struct, frozen=True):
    """What events of an item have in common."""

    sequence_number: int
    output_index: int
    item_id: str


class ContentPartAdded(
    OfItem, frozen=True, kw_only=True, tag="response.content_part.added", tag_field="type"
):
    part: ContentPart
    content_index: int = 0


class ContentPartDone(OfItem, frozen=True, kw_only=True, tag="response.content_part.done", tag_field="type"):
    part: ContentPart
    content_index: int = 0


class TextDelta(OfItem, frozen=True, kw_only=True, tag="response.output_text.delta", tag_field="type"):
    delta: str
    content_index: int = 0
    logprobs: tuple[()] = ()


class TextDone(OfItem, frozen=True, kw_only=True, tag="response.output_text.done", tag_field="type"):
    text: str
    content_index: int = 0
    logprobs: tuple[()] = ()


class ReasoningDelta(
    OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta", tag_field="type"
):
    delta: str
    content_index: int = 0


class ReasoningDone(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.done", tag_field="type"):
    text: str
    content_index: int = 0


class ArgumentsDelta(
    OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta", tag_field="type"
):
    delta: str


class ArgumentsDone(
    OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done", tag_field="type"
):
    name: str
    arguments: str


StreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
