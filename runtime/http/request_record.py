"""What is kept of each HTTP request while it is served: its id, its token counts, how it ended."""

from __future__ import annotations

import asyncio
import os
from typing import Literal, Self

import msgspec
from multidict import CIMultiDictProxy, istr

from dynrt.runtime.http.openai.types import PromptTokensDetails, Usage
from dynrt.runtime.requests import GenerateOutput
from dynrt.runtime.trace_context import valid_traceparent

MAX_REQUEST_ID_CHARS = 128
# Names in the form in which headers are kept: looked up without being folded first.
_X_REQUEST_ID = istr("X-Request-Id")
_TRACEPARENT = istr("traceparent")

Outcome = Literal["answered", "failed", "client_left", "client_stalled"]


class RequestRecord(msgspec.Struct):
    """Filled in as the request goes on; read by the access log and for `usage`."""

    request_id: str
    traceparent: str = ""  # the client's, if it sent one
    prompt_tokens: int = 0  # of all prompts, whatever the number of choices for each
    output_tokens: int = 0  # of all choices
    outcome: Outcome = "answered"
    first_output_at: float | None = None  # in the loop's time
    sent_status: int | None = None  # once a stream is written to its end
    cached_by_prompt: dict[int, int] = {}  # tokens, of what the luckiest of its choices found

    @classmethod
    def of(cls, headers: CIMultiDictProxy[str]) -> Self:
        """The record of a request with `headers`, at its beginning."""
        wanted, traceparent = headers.get(_X_REQUEST_ID), headers.get(_TRACEPARENT)
        return cls(
            (wanted and _visible(wanted)) or os.urandom(16).hex(),
            valid_traceparent(traceparent) if traceparent else "",
        )

    def count(self, output: GenerateOutput, prompt: int) -> None:
        """Note an output of a choice for prompt number `prompt`."""
        if self.first_output_at is None:
            self.first_output_at = asyncio.get_running_loop().time()
        self.output_tokens += len(output.token_ids)
        if output.cached_tokens > self.cached_by_prompt.get(prompt, 0):
            self.cached_by_prompt[prompt] = output.cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            total_tokens=self.prompt_tokens + self.output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.cached_by_prompt.values())),
        )


def _visible(wanted: str) -> str:
    """The client's id reduced to visible ASCII, so that headers, logs and messages can carry it."""
    return "".join([char for char in wanted[:MAX_REQUEST_ID_CHARS] if "!" <= char <= "~"])
