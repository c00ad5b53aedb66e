"""What a generated text says: reasoning, text and calls of tools, told as it comes; the same for every endpoint."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynrt.engines.token_bytes import TokenBytes
from dynrt.runtime.http.answers.reasoning.formats import ReasoningFormat
from dynrt.runtime.http.answers.reasoning.parser import Answer, ReasoningParser, Thought
from dynrt.runtime.http.answers.reasoning.tokens import ReasoningTokens
from dynrt.runtime.http.answers.tools.events import Text, ToolEvent, ToolParser
from dynrt.runtime.requests import GenerateOutput

AnswerEvent = Thought | ToolEvent


class ReasoningPlan(msgspec.Struct, frozen=True):
    """How reasoning is told from the rest."""

    format: ReasoningFormat
    prompt_end: str  # the last characters of the prompt: it may have opened the reasoning
    vocabulary: TokenBytes  # for counting its tokens

    def parser(self) -> ReasoningParser:
        return self.format.parser(self.prompt_end)

    def token_counter(self) -> ReasoningTokens:
        return self.format.token_counter(self.prompt_end, self.vocabulary)


class AnswerPlan(msgspec.Struct, frozen=True):
    """How the answers to one request are read. Without formats they are all text."""

    new_call_id: Callable[[], str]
    reasoning: ReasoningPlan | None = None
    tools: Callable[[], ToolParser] | None = None
    parallel_calls: bool = True
    special_tokens: tuple[str, ...] = ()  # that the formats consist of: text must have them

    @property
    def is_plain(self) -> bool:
        """Whether answers are nothing but text."""
        return self.reasoning is None and self.tools is None

    def reader(self) -> AnswerReader:
        """For one choice."""
        tools = None if self.tools is None else self.tools()
        return AnswerReader(self.reasoning, tools, parallel_calls=self.parallel_calls)


class AnswerReader:
    """Reads one answer in pieces. Of calls that may not be parallel, only the first is told."""

    def __init__(
        self, reasoning: ReasoningPlan | None, tools: ToolParser | None, *, parallel_calls: bool
    ) -> None:
        self._reasoning = None if reasoning is None else reasoning.parser()
        self._reasoning_tokens = None if reasoning is None else reasoning.token_counter()
        self._tools = tools
        self._max_calls = None if parallel_calls else 1

    @property
    def reasoning_tokens(self) -> int:
        """How many of its tokens were reasoning; none where it is not looked for."""
        return 0 if self._reasoning_tokens is None else self._reasoning_tokens.count

    def read(self, output: GenerateOutput) -> list[AnswerEvent]:
        """What `output` makes certain."""
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.add(output.token_ids)
        events = self._feed(output.text)
        return events if output.finish_reason is None else events + self._finish()

    def _feed(self, text: str) -> list[AnswerEvent]:
        if self._reasoning is None:
            return self._answer(text)
        return self._split(self._reasoning.feed(text))

    def _finish(self) -> list[AnswerEvent]:
        events = [] if self._reasoning is None else self._split(self._reasoning.finish())
        return events if self._tools is None else events + self._allowed(self._tools.finish())

    def _split(self, told: list[Thought | Answer]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for one in told:
            events += [one] if isinstance(one, Thought) else self._answer(one.text)
        return events

    def _answer(self, text: str) -> list[AnswerEvent]:
        if self._tools is not None:
            return self._allowed(self._tools.feed(text))
        return [Text(text)] if text else []

    def _allowed(self, events: list[ToolEvent]) -> list[AnswerEvent]:
        return [event for event in events if isinstance(event, Text) or self._may_be_told(event.index)]

    def _may_be_told(self, call: int) -> bool:
        return self._max_calls is None or call < self._max_calls
