"""The answers of POST /v1/chat/completions that have more in them than text: reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from dynrt.runtime.http.answers.answer import AnswerEvent, AnswerPlan, AnswerReader
from dynrt.runtime.http.answers.blocks import Block, Blocks
from dynrt.runtime.http.answers.reasoning.parser import Thought
from dynrt.runtime.http.answers.tools.events import ArgumentsPiece, CallBegun, Text
from dynrt.runtime.http.openai import types as openai
from dynrt.runtime.http.openai.chat_reply import ChatReply
from dynrt.runtime.http.openai.replies import finish_word
from dynrt.runtime.messages import Frame
from dynrt.runtime.requests import GenerateOutput


class ChatAnswer:
    """What has been told of one choice."""

    def __init__(self, reader: AnswerReader, new_call_id: Callable[[], str]) -> None:
        self._reader = reader
        self._new_call_id = new_call_id
        self.has_calls = False

    def deltas(self, output: GenerateOutput) -> list[openai.Delta]:
        events = self._reader.read(output)
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: AnswerEvent) -> openai.Delta | None:
        match event:
            case Thought(text):
                return openai.Delta(reasoning_content=text)
            case Text(text):
                return openai.Delta(content=text)
            case CallBegun(index, name):
                self.has_calls = True
                function = openai.FunctionDelta("", name)
                call = openai.ToolCallDelta(index, function, self._new_call_id(), "function")
                return openai.Delta(tool_calls=[call])
            case ArgumentsPiece(index, piece):
                return openai.Delta(tool_calls=[openai.ToolCallDelta(index, openai.FunctionDelta(piece))])
            case _:
                return None


class ChatAnswerReply(ChatReply, frozen=True):
    """See replies.Reply. Text is read here, so it does not come in frames."""

    plan: AnswerPlan
    readers: dict[int, AnswerReader] = msgspec.field(default_factory=dict)  # by choice
    answers: dict[int, ChatAnswer] = msgspec.field(default_factory=dict)  # by choice, of a stream

    def frame(self, index: int) -> Frame | None:
        return None

    def events(
        self, index: int, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType
    ) -> bytes:
        finish = finish_word(output)
        answer = self.answers.get(index)
        if answer is None:
            answer = self.answers[index] = ChatAnswer(self._new_reader(index), self.plan.new_call_id)
        deltas = answer.deltas(output)
        if not deltas and (first or (self._tells_tokens and output.token_ids)):
            deltas = [openai.Delta()]  # no content yet: there may be none but calls
        if first:
            deltas[0] = msgspec.structs.replace(deltas[0], role="assistant")
        told_ids = self._prompt_token_ids() if first and index == 0 else UNSET
        usage = UNSET if usage is UNSET else self._with_reasoning(usage)
        chunks: list[bytes] = []
        for choice in self._told_with_tokens(index, output, deltas):
            chunks.append(self._chunk([choice], usage, told_ids))
            told_ids = UNSET
        if finish is not None:
            word = _finish_with_calls(finish, has_calls=answer.has_calls)
            end = openai.ChunkChoice(openai.Delta(), word, output.stop_reason, index)
            chunks.append(self._chunk([end], usage))
        return b"".join(chunks)

    def usage_event(self, usage: openai.Usage) -> bytes:
        return ChatReply.usage_event(self, self._with_reasoning(usage))

    def whole(self, outputs: Sequence[GenerateOutput], usage: openai.Usage) -> openai.ChatCompletion:
        completion = ChatReply.whole(self, outputs, usage)
        return msgspec.structs.replace(completion, usage=self._with_reasoning(usage))

    def _new_reader(self, index: int) -> AnswerReader:
        reader = self.readers[index] = self.plan.reader()
        return reader

    def _with_reasoning(self, usage: openai.Usage) -> openai.Usage:
        """`usage`, and how many tokens that were read were reasoning, where it is looked for."""
        if self.plan.reasoning is None:
            return usage
        count = sum(reader.reasoning_tokens for reader in self.readers.values())
        return msgspec.structs.replace(usage, completion_tokens_details=openai.CompletionTokensDetails(count))

    def _told_with_tokens(
        self, index: int, output: GenerateOutput, deltas: Iterable[openai.Delta]
    ) -> list[openai.ChunkChoice]:
        """The tokens of an output are told with the first of its deltas."""
        choices = [openai.ChunkChoice(delta, index=index) for delta in deltas]
        if choices and output.token_ids:
            logprobs, token_ids = self._logprobs(output) or UNSET, self._token_ids(output)
            choices[0] = msgspec.structs.replace(choices[0], logprobs=logprobs, token_ids=token_ids)
        return choices

    def _choice(self, index: int, output: GenerateOutput) -> openai.ChatChoice:
        blocks = Blocks(self.plan.new_call_id)
        blocks.follow(self._new_reader(index).read(output))
        choice = ChatReply._choice(self, index, output)
        return msgspec.structs.replace(
            choice,
            message=_message(blocks),
            finish_reason=_finish_with_calls(choice.finish_reason, has_calls=blocks.has_calls),
        )


def _finish_with_calls(finish: openai.FinishWord, *, has_calls: bool) -> openai.FinishWord:
    """An answer that is cut off keeps "length": its last call may lack arguments."""
    return "tool_calls" if has_calls and finish == "stop" else finish


def _message(blocks: Blocks) -> openai.Message:
    text = "".join(block.content for block in blocks.all if block.kind == "text")
    reasoning = "".join(block.content for block in blocks.all if block.kind == "reasoning")
    calls = [_call(block) for block in blocks.all if block.kind == "call"]
    return openai.Message(None if calls and not text else text, reasoning or UNSET, calls or UNSET)


def _call(block: Block) -> openai.ToolCall:
    return openai.ToolCall(block.call_id, openai.FunctionCall(block.name, block.content))
