"""Puts the outputs of a request's choices into the bodies and stream events of one endpoint; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from dynrt.runtime.errors import EngineError
from dynrt.runtime.http import openai_types as openai
from dynrt.runtime.http.sse import event
from dynrt.runtime.messages import Frame
from dynrt.runtime.requests import GenerateOutput


class Reply(Protocol):
    """One endpoint's way of telling what was generated."""

    def events(
        self, index: int, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType
    ) -> bytes:
        """`output` of choice `index` as stream events, none if it shows nothing; with `usage` in each if it is set.

        `first`: the choice has had no events yet. Text that comes in ready frames is passed on as it is.
        """
        ...

    def frame(self, index: int) -> Frame | None:
        """What is around the text in an event of choice `index`. None: its text must come here, not in frames."""
        ...

    def usage_event(self, usage: openai.Usage) -> bytes:
        """The stream's last chunk: no choices, only `usage`."""
        ...

    def whole(self, outputs: Sequence[GenerateOutput], usage: openai.Usage) -> msgspec.Struct:
        """The body of an answer that is not streamed; `outputs`: all of each choice's, joined."""
        ...


def finish_word(output: GenerateOutput) -> openai.FinishWord | None:
    """OpenAI's word for the end. A request that ended otherwise has failed: raises EngineError."""
    match output.finish_reason:
        case "cancelled" | "error" as failure:
            raise EngineError(f"the engine ended the request without completing it ({failure})")
        case finish:
            return finish


_TEXT = "\ue000"  # stands for the text: of Unicode's private use, so in no id and no model's name


def _frame(event_of_text: bytes) -> Frame:
    prefix, _, suffix = event_of_text.partition(msgspec.json.encode(_TEXT))
    return Frame(prefix, suffix)


class ChatReply(msgspec.Struct, frozen=True):
    """For POST /v1/chat/completions."""

    ID_PREFIX: ClassVar[str] = "chatcmpl"

    id: str
    created: int
    model: str

    def events(
        self, index: int, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType
    ) -> bytes:
        finish = finish_word(output)
        events = b""
        if first or output.text:
            delta = openai.Delta(role="assistant" if first else UNSET, content=output.text)
            events += self._chunk([openai.ChunkChoice(delta, index=index)], usage)
        events += output.frames
        if finish is not None:
            end = openai.ChunkChoice(openai.Delta(), finish, output.stop_reason, index)
            events += self._chunk([end], usage)
        return events

    def frame(self, index: int) -> Frame | None:
        return _frame(self._chunk([openai.ChunkChoice(openai.Delta(content=_TEXT), index=index)], UNSET))

    def usage_event(self, usage: openai.Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, outputs: Sequence[GenerateOutput], usage: openai.Usage) -> openai.ChatCompletion:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return openai.ChatCompletion(self.id, self.created, self.model, choices, usage)

    def _choice(self, index: int, output: GenerateOutput) -> openai.ChatChoice:
        finish = finish_word(output)
        assert finish is not None, "a whole output says why it ended"
        return openai.ChatChoice(openai.Message(output.text), finish, output.stop_reason, index)

    def _chunk(self, choices: list[openai.ChunkChoice], usage: openai.Usage | UnsetType) -> bytes:
        return event(openai.ChatChunk(self.id, self.created, self.model, choices, usage))


class TextReply(msgspec.Struct, frozen=True):
    """For POST /v1/completions."""

    ID_PREFIX: ClassVar[str] = "cmpl"

    id: str
    created: int
    model: str

    def events(
        self, index: int, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType
    ) -> bytes:
        finish = finish_word(output)
        if not (output.text or finish or (first and not output.frames)):
            return output.frames
        stop_reason = UNSET if finish is None else output.stop_reason
        choice = openai.TextChoice(output.text, finish, stop_reason, index)
        return output.frames + event(self._completion([choice], usage))

    def frame(self, index: int) -> Frame | None:
        return _frame(event(self._completion([openai.TextChoice(_TEXT, None, UNSET, index)], UNSET)))

    def usage_event(self, usage: openai.Usage) -> bytes:
        return event(self._completion([], usage))

    def whole(self, outputs: Sequence[GenerateOutput], usage: openai.Usage) -> openai.Completion:
        choices = [
            openai.TextChoice(output.text, finish_word(output), output.stop_reason, index)
            for index, output in enumerate(outputs)
        ]
        return self._completion(choices, usage)

    def _completion(
        self, choices: list[openai.TextChoice], usage: openai.Usage | UnsetType
    ) -> openai.Completion:
        return openai.Completion(self.id, self.created, self.model, choices, usage)
