"""Calls as Mistral models write them: [TOOL_CALLS][{"name": …, "arguments": …}, …], and since 2025
[TOOL_CALLS]name{…} with the arguments alone, in some of them as [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}.
"""

from __future__ import annotations

import re

from dynrt.runtime.http.answers.tape import SPACE, Reading
from dynrt.runtime.http.answers.tools.call_parser import CallParser

MARKER = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"

_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class MistralParser(CallParser):
    def _read(self) -> Reading[None]:
        while (yield from self._text_before(MARKER)):
            yield from self._attempt(self._marked_calls())

    def _marked_calls(self) -> Reading[None]:
        yield from self._tape.accept(MARKER)
        yield from self._tape.read_while(SPACE)
        match (yield from self._tape.peek()):
            case "[":
                yield from self._call_list()
            case "{":
                yield from self._call_object()
            case _:
                yield from self._named_call()

    def _named_call(self) -> Reading[None]:
        name = yield from self._tape.read_while(_NAME)
        self._check_offered(name)
        if (yield from self._tape.accept(CALL_ID)):
            yield from self._tape.read_while(_NAME)  # the id that the model gives is not needed
        yield from self._tape.accept(ARGUMENTS)
        yield from self._told_arguments(name)
