"""The tags that models write around their reasoning, and which of them a model writes."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from dynrt.engines.token_bytes import TokenBytes
from dynrt.runtime.http.answers.reasoning.parser import ReasoningParser
from dynrt.runtime.http.answers.reasoning.tokens import ReasoningTokens


class ReasoningFormat(msgspec.Struct, frozen=True):
    """Reasoning is between two tags.

    `starts_open`: the model reasons from its first token on, with an opening tag or without one.
    """

    opening: str
    closing: str
    starts_open: bool = False

    def parser(self, prompt_end: str) -> ReasoningParser:
        """For an answer to a prompt that ends so."""
        return ReasoningParser(self.opening, self.closing, is_open=self._is_opened_by(prompt_end))

    def token_counter(self, prompt_end: str, vocabulary: TokenBytes) -> ReasoningTokens:
        """Likewise."""
        is_open = self._is_opened_by(prompt_end)
        return ReasoningTokens(self.opening, self.closing, vocabulary, is_open=is_open)

    def _is_opened_by(self, prompt_end: str) -> bool:
        """Templates may open the reasoning, or close it to forbid it."""
        end = prompt_end.rstrip()
        forbidden = end.endswith(self.closing)
        return end.endswith(self.opening) or (self.starts_open and not forbidden)


REASONING_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", starts_open=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}
BY_TEMPLATE = ("mistral", "seed_oss", "kimi", "qwen3")  # the first whose closing tag the template has


@lru_cache(maxsize=16)
def reasoning_format_of(chat_template: str) -> str | None:
    """The name of the format that the model behind `chat_template` writes; None if it shows none."""
    return next((name for name in BY_TEMPLATE if REASONING_FORMATS[name].closing in chat_template), None)
