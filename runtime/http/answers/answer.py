"""What a generated text says: reasoning, text and calls of tools, told as it comes; the same for every endpoint."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynrt.runtime.http.answers.reasoning.formats import ReasoningFormat
from dynrt.runtime.http.answers.reasoning.parser import Answer, ReasoningParser, Thought
from dynrt.runtime.http.answers.tools.events import Text, ToolEvent, ToolParser

AnswerEvent = Thought | ToolEvent


class AnswerPlan(msgspec.Struct, frozen=True):
    """How the answers to one request are read. Without formats they are all text."""

    new_call_id: Callable[[], str]
    reasoning: ReasoningFormat | None = None
    prompt_end: str = ""  # the last characters of the prompt: it may have opened the reasoning
    tools: Callable[[], ToolParser] | None = None
    parallel_calls: bool = True
    special_tokens: tuple[str, ...] = ()  # that the formats consist of: text must have them

    @property
    def is_plain(self) -> bool:
        """Whether answers are nothing but text."""
        return self.reasoning is None and self.tools is None

    def reader(self) -> AnswerReader:
        """For one choice."""
        reasoning = None if self.reasoning is None else self.reasoning.parser(self.prompt_end)
        return AnswerReader(
            reasoning, self.tools() if self.tools else None, parallel_calls=self.parallel_calls
        )


class AnswerReader:
    """Reads one answer in pieces. Of calls that may not be parallel, only the first is told."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, parallel_calls: bool
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = None if parallel_calls else 1

    def feed(self, text: str) -> list[AnswerEvent]:
        """What `text` makes certain."""
        if self._reasoning is None:
            return self._answer(text)
        return self._split(self._reasoning.feed(text))

    def finish(self) -> list[AnswerEvent]:
        """What the end makes certain."""
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
