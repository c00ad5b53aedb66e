"""The parts of an answer in their order, each of one kind: what Responses calls items and Messages content blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from dynrt.runtime.http.answers.answer import AnswerEvent
from dynrt.runtime.http.answers.reasoning.parser import Thought
from dynrt.runtime.http.answers.tools.events import ArgumentsPiece, CallBegun, CallEnded, Text


class Block(msgspec.Struct):
    """One part. `content`: its text, or a call's arguments as JSON."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    name: str = ""  # of the called tool
    call_id: str = ""
    pieces: list[str] = msgspec.field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.pieces)


class BlockNews(msgspec.Struct, frozen=True):
    """A block opens, grows by `piece`, or is complete."""

    what: Literal["opened", "grown", "closed"]
    block: Block
    piece: str = ""


class Blocks:
    """Follows one answer. At most the last block is open."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._is_open = False
        self.all: list[Block] = []

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def follow(self, events: Iterable[AnswerEvent]) -> list[BlockNews]:
        news: list[BlockNews] = []
        for event in events:
            match event:
                case Thought(text):
                    news += self._grow("reasoning", text)
                case Text(text):
                    news += self._grow("text", text)
                case CallBegun(_, name):
                    news += self._open("call", name)
                case ArgumentsPiece(_, piece):
                    news += self._grow("call", piece)
                case CallEnded():
                    news += self.close()
        return news

    def close(self) -> list[BlockNews]:
        """Close the open block, if there is one."""
        was_open, self._is_open = self._is_open, False
        return [BlockNews("closed", self.all[-1])] if was_open else []

    def _open(self, kind: Literal["reasoning", "text", "call"], name: str = "") -> list[BlockNews]:
        news = self.close()
        call_id = self._new_call_id() if kind == "call" else ""
        self.all.append(Block(len(self.all), kind, name, call_id))
        self._is_open = True
        return [*news, BlockNews("opened", self.all[-1])]

    def _grow(self, kind: Literal["reasoning", "text", "call"], piece: str) -> list[BlockNews]:
        news = [] if self._is_open and self.all[-1].kind == kind else self._open(kind)
        self.all[-1].pieces.append(piece)
        return [*news, BlockNews("grown", self.all[-1], piece)]
