"""Calls as Hermes and Qwen models write them: <tool_call>{"name": …, "arguments": …}</tool_call>, any number."""

from __future__ import annotations

from dynrt.runtime.http.answers.tape import Reading
from dynrt.runtime.http.answers.tools.call_parser import CallParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(CallParser):
    def _read(self) -> Reading[None]:
        while (yield from self._text_before(OPEN)):
            yield from self._attempt(self._tagged_call())

    def _tagged_call(self) -> Reading[None]:
        yield from self._tape.accept(OPEN)
        yield from self._call_object()
        yield from self._tape.accept_spaced(CLOSE)  # some models forget it
        self._tape.take()
