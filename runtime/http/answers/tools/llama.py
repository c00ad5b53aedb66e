"""Calls as Llama 3 writes them: an answer that is {"name": …, "parameters": …}, several with ; between them.

<|python_tag|> before a call is optional at the beginning of the answer and needed elsewhere.
"""

from __future__ import annotations

from dynrt.runtime.http.answers.tape import Reading
from dynrt.runtime.http.answers.tools.call_parser import CallParser

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = ";"


class LlamaParser(CallParser):
    def _read(self) -> Reading[None]:
        yield from self._attempt(self._calls())
        while (yield from self._text_before(PYTHON_TAG)):
            yield from self._attempt(self._tagged_calls())

    def _tagged_calls(self) -> Reading[None]:
        yield from self._tape.accept(PYTHON_TAG)
        yield from self._calls()

    def _calls(self) -> Reading[None]:
        yield from self._call_object()
        while (yield from self._tape.accept_spaced(SEPARATOR)):
            yield from self._call_object()
