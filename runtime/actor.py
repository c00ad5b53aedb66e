"""Actors: a task with a bounded mailbox, typed messages and one owner."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

from dynrt.runtime.errors import AskTimeoutError, DynrtError, MailboxFullError

Message = TypeVar("Message")

TURN_S = 0.001  # a message more may be under way when it is over


class _Letter(NamedTuple):
    message: Any
    reply: asyncio.Future[Any] | None
    fault: Exception | None = None  # instead of a message: what the actor is to end with


class Actor(ABC, Generic[Message]):
    """Handles one message at a time in `receive`; its owner runs `run` as a task."""

    def __init__(self, name: str, mailbox_limit: int = 16_384) -> None:
        self.name = name
        self._mailbox: asyncio.Queue[_Letter] = asyncio.Queue(mailbox_limit)
        self.is_at_rest = False  # it waits for a message: what is done to it now is done in its turn

    @property
    def mailbox_size(self) -> int:
        return self._mailbox.qsize()

    def tell(self, message: Message) -> None:
        """Send without waiting. Raises MailboxFullError at the bound."""
        self._put(_Letter(message, None))

    async def ask(self, message: Message, timeout_s: float) -> Any:
        """Send and await the answer. Raises AskTimeoutError, MailboxFullError, and what `receive` refuses with."""
        reply = asyncio.get_running_loop().create_future()
        self._put(_Letter(message, reply))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise AskTimeoutError(f"{self.name} did not answer within {timeout_s:g} s") from None

    def fail(self, fault: Exception) -> None:
        """End it, and let its owner know why: for what went wrong in a turn that another task took at its rest."""
        self._put(_Letter(None, None, fault))

    @abstractmethod
    async def receive(self, message: Message) -> Any:
        """Handle one message; the returned value answers an `ask`. A DynrtError refuses the asker, no more."""

    async def run(self) -> None:
        """Until cancelled. An exception that is not a refusal ends the actor and reaches its owner.

        A full mailbox does not keep the loop: after each turn the others have theirs.
        """
        loop = asyncio.get_running_loop()
        while True:
            self.is_at_rest = self._mailbox.empty()
            letter = await self._mailbox.get()
            turn_ends_at = loop.time() + TURN_S
            await self._handle(letter)
            while not self._mailbox.empty() and loop.time() < turn_ends_at:
                await self._handle(self._mailbox.get_nowait())
            if not self._mailbox.empty():
                await asyncio.sleep(0)

    def _put(self, letter: _Letter) -> None:
        try:
            self._mailbox.put_nowait(letter)
            self.is_at_rest = False
        except asyncio.QueueFull:
            raise MailboxFullError(
                f"the mailbox of {self.name} is full ({self._mailbox.maxsize} messages)"
            ) from None

    async def _handle(self, letter: _Letter) -> None:
        if letter.fault is not None:
            raise letter.fault
        try:
            answer = await self.receive(letter.message)
        except DynrtError as error:
            if letter.reply is None:
                raise
            if not letter.reply.done():
                letter.reply.set_exception(error)
            return
        if letter.reply is not None and not letter.reply.done():
            letter.reply.set_result(answer)
