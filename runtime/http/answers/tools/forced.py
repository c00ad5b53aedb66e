"""Calls that a grammar forces the model to write, where the request names a tool or requires one."""

from __future__ import annotations

from dynrt.runtime.http.answers.tape import Reading
from dynrt.runtime.http.answers.tools.call_parser import CallParser


class ForcedListParser(CallParser):
    """The answer is a list of calls: [{"name": …, "arguments": …}, …]."""

    def _read(self) -> Reading[None]:
        yield from self._attempt(self._call_list())
        yield from self._text_to_end()


class ForcedCallParser(CallParser):
    """The answer is the arguments of the one tool there is."""

    def _read(self) -> Reading[None]:
        [name] = self._tools
        yield from self._attempt(self._told_arguments(name))
        yield from self._text_to_end()
