"""Puts a request's outputs into the bodies and stream events of one endpoint; pure."""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from dynrt.runtime.errors import EngineError
from dynrt.runtime.http import openai_types as openai
from dynrt.runtime.http.sse import event
from dynrt.runtime.requests import GenerateOutput


class Reply(Protocol):
    """One endpoint's way of telling what was generated."""

    def events(self, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType) -> bytes:
        """`output` as stream events, none if it shows nothing; with `usage` in each if it is set."""
        ...

    def usage_event(self, usage: openai.Usage) -> bytes:
        """The stream's last chunk: no choices, only `usage`."""
        ...

    def whole(self, text: str, last: GenerateOutput, usage: openai.Usage) -> msgspec.Struct:
        """The body of an answer that is not streamed."""
        ...


def finish_word(output: GenerateOutput) -> openai.FinishWord | None:
    """OpenAI's word for the end. A request that ended otherwise has failed: raises EngineError."""
    match output.finish_reason:
        case "cancelled" | "error" as failure:
            raise EngineError(f"the engine ended the request without completing it ({failure})")
        case finish:
            return finish


class ChatReply(msgspec.Struct, frozen=True):
    """For POST /v1/chat/completions."""

    ID_PREFIX: ClassVar[str] = "chatcmpl"

    id: str
    created: int
    model: str

    def events(self, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType) -> bytes:
        finish = finish_word(output)
        events = b""
        if first or output.text:
            delta = openai.Delta(role="assistant" if first else UNSET, content=output.text)
            events += self._chunk([openai.ChunkChoice(delta)], usage)
        if finish is not None:
            end = openai.ChunkChoice(openai.Delta(), finish_reason=finish, stop_reason=output.stop_reason)
            events += self._chunk([end], usage)
        return events

    def usage_event(self, usage: openai.Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, text: str, last: GenerateOutput, usage: openai.Usage) -> openai.ChatCompletion:
        finish = finish_word(last)
        assert finish is not None, "the last output says why it is the last"
        choice = openai.ChatChoice(openai.Message(text), finish_reason=finish, stop_reason=last.stop_reason)
        return openai.ChatCompletion(self.id, self.created, self.model, [choice], usage)

    def _chunk(self, choices: list[openai.ChunkChoice], usage: openai.Usage | UnsetType) -> bytes:
        return event(openai.ChatChunk(self.id, self.created, self.model, choices, usage))


class TextReply(msgspec.Struct, frozen=True):
    """For POST /v1/completions."""

    ID_PREFIX: ClassVar[str] = "cmpl"

    id: str
    created: int
    model: str

    def events(self, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType) -> bytes:
        finish = finish_word(output)
        if not (first or output.text or finish):
            return b""
        stop_reason = UNSET if finish is None else output.stop_reason
        return event(self._completion([openai.TextChoice(output.text, finish, stop_reason)], usage))

    def usage_event(self, usage: openai.Usage) -> bytes:
        return event(self._completion([], usage))

    def whole(self, text: str, last: GenerateOutput, usage: openai.Usage) -> openai.Completion:
        choice = openai.TextChoice(text, finish_word(last), last.stop_reason)
        return self._completion([choice], usage)

    def _completion(
        self, choices: list[openai.TextChoice], usage: openai.Usage | UnsetType
    ) -> openai.Completion:
        return openai.Completion(self.id, self.created, self.model, choices, usage)
