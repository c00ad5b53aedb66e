"""Puts an answer into the body or the stream events of OpenAI's Responses API; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

from dynrt.runtime.http.answers.answer import AnswerPlan
from dynrt.runtime.http.answers.blocks import Block, BlockNews, Blocks
from dynrt.runtime.http.openai.replies import finish_word
from dynrt.runtime.http.openai.types import Usage
from dynrt.runtime.http.responses import types
from dynrt.runtime.http.sse import named_event
from dynrt.runtime.messages import Frame
from dynrt.runtime.requests import GenerateOutput

ID_PREFIX = "resp"
ITEM_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesReply:
    """For POST /v1/responses, which has one choice. Its text is told apart here, so it does not come in frames."""

    def __init__(
        self, response_id: str, created: int, model: str, plan: AnswerPlan, echo: types.Echo
    ) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._echo = echo
        self._reader = plan.reader()
        self._blocks = Blocks(plan.new_call_id)
        self._num_events = 0
        self._status: types.Status = "in_progress"

    def frame(self, index: int) -> Frame | None:
        return None

    def events(self, index: int, output: GenerateOutput, *, first: bool, usage: Usage | UnsetType) -> bytes:
        started = self._start() if first else b""
        return started + b"".join([self._told(news) for news in self._follow(output)])

    def usage_event(self, usage: Usage) -> bytes:
        end = types.ResponseCompleted if self._status == "completed" else types.ResponseIncomplete
        return self._event(end, response=self._response(usage))

    def whole(self, outputs: Sequence[GenerateOutput], usage: Usage) -> types.Response:
        [output] = outputs
        self._follow(output)
        return self._response(usage)

    def _follow(self, output: GenerateOutput) -> list[BlockNews]:
        finish = finish_word(output)
        news = self._blocks.follow(self._reader.read(output))
        if finish is not None:
            self._status = "incomplete" if finish == "length" else "completed"
            news += self._blocks.close()
        return news

    def _start(self) -> bytes:
        response = self._response(None)
        return self._event(types.ResponseCreated, response=response) + self._event(
            types.ResponseInProgress, response=response
        )

    def _response(self, usage: Usage | None) -> types.Response:
        is_cut = self._status == "incomplete"
        return types.Response(
            id=self._id,
            created_at=self._created,
            model=self._model,
            status=self._status,
            output=[self._item(block) for block in self._blocks.all],
            usage=None if usage is None else usage_of(usage, self._reader.reasoning_tokens),
            incomplete_details=types.IncompleteDetails() if is_cut else None,
            **msgspec.structs.asdict(self._echo),
        )

    def _told(self, news: BlockNews) -> bytes:
        match news.what:
            case "opened":
                return self._opened(news.block)
            case "grown":
                return self._grown(news.block, news.piece)
            case "closed":
                return self._closed(news.block)

    def _opened(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        added = self._event(types.OutputItemAdded, output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._item_event(types.ContentPartAdded, block, part=_part(block))

    def _grown(self, block: Block, piece: str) -> bytes:
        match block.kind:
            case "text":
                return self._item_event(types.TextDelta, block, delta=piece)
            case "reasoning":
                return self._item_event(types.ReasoningDelta, block, delta=piece)
            case "call":
                return self._item_event(types.ArgumentsDelta, block, delta=piece)

    def _closed(self, block: Block) -> bytes:
        content = block.content
        match block.kind:
            case "text":
                events = self._item_event(types.TextDone, block, text=content)
            case "reasoning":
                events = self._item_event(types.ReasoningDone, block, text=content)
            case "call":
                events = self._item_event(types.ArgumentsDone, block, name=block.name, arguments=content)
        if block.kind != "call":
            events += self._item_event(types.ContentPartDone, block, part=_part(block))
        return events + self._event(types.OutputItemDone, output_index=block.index, item=self._item(block))

    def _item(self, block: Block, status: types.Status | None = None) -> types.OutputItem:
        """`block` as it is complete; one in progress has no content yet."""
        is_last = block.index == len(self._blocks.all) - 1
        shown = status or ("incomplete" if is_last and self._status == "incomplete" else "completed")
        item_id = self._item_id(block)
        match block.kind:
            case "call":
                return types.FunctionCallItem(item_id, shown, block.call_id, block.name, block.content)
            case "reasoning":
                parts = [types.ReasoningText(block.content)] if block.pieces else []
                return types.ReasoningItem(item_id, shown, parts)
            case "text":
                return types.MessageItem(
                    item_id, shown, [types.OutputText(block.content)] if block.pieces else []
                )

    def _item_id(self, block: Block) -> str:
        return f"{ITEM_PREFIXES[block.kind]}_{self._id.removeprefix(f'{ID_PREFIX}_')}_{block.index}"

    def _item_event(self, kind: type[types.OfItem], block: Block, **fields: Any) -> bytes:
        return self._event(kind, output_index=block.index, item_id=self._item_id(block), **fields)

    def _event(self, kind: type[msgspec.Struct], **fields: Any) -> bytes:
        event = kind(sequence_number=self._num_events, **fields)
        self._num_events += 1
        return named_event(event)


def usage_of(usage: Usage, reasoning_tokens: int) -> types.ResponseUsage:
    return types.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=types.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=types.OutputTokensDetails(reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _part(block: Block) -> types.ContentPart:
    if block.kind == "reasoning":
        return types.ReasoningText(block.content)
    return types.OutputText(block.content)
