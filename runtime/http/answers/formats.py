"""Which formats of tool calls and reasoning a server reads in its model's answers: told by flags or the template."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.answers.reasoning.formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_format_of,
)
from dynrt.runtime.http.answers.tools.formats import TOOL_FORMATS, ToolFormat, tool_format_of

NONE = "none"


class AnswerFormats(msgspec.Struct, frozen=True):
    """Names of formats; None: what the model's chat template shows, "none": none is read."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def check(self) -> None:
        """Raises ConfigError for a name that is not known."""
        _check("--tool-parser", self.tool_parser, TOOL_FORMATS)
        _check("--reasoning-parser", self.reasoning_parser, REASONING_FORMATS)

    def of_tools(self, chat_template: str) -> ToolFormat | None:
        """In which the model behind `chat_template` calls tools, if it does."""
        return TOOL_FORMATS.get(self.tool_parser or tool_format_of(chat_template) or NONE)

    def of_reasoning(self, chat_template: str) -> ReasoningFormat | None:
        """In which the model behind `chat_template` reasons, if it does."""
        return REASONING_FORMATS.get(self.reasoning_parser or reasoning_format_of(chat_template) or NONE)


def _check(flag: str, name: str | None, known: Mapping[str, object]) -> None:
    if name is not None and name != NONE and name not in known:
        raise ConfigError(f"{flag} is {name}; it can be {', '.join(known)} or {NONE}")
