"""Actors: bounded mailboxes, answers with a deadline, and who hears of an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from dynrt.runtime.actor import Actor
from dynrt.runtime.errors import AskTimeoutError, InvalidRequestError, MailboxFullError


class Doubler(Actor[int]):
    """Doubles what it is asked; refuses negative numbers, fails at zero, never answers above 100."""

    def __init__(self, mailbox_limit: int = 10) -> None:
        super().__init__("doubler", mailbox_limit)
        self.heard: list[int] = []

    async def receive(self, message: int) -> int:
        self.heard.append(message)
        if message < 0:
            raise InvalidRequestError(f"{message} is negative")
        if message > 100:
            await asyncio.Event().wait()
        return message // (1 if message else 0) * 2


@pytest.fixture
async def doubler() -> AsyncIterator[Doubler]:
    actor = Doubler()
    task = asyncio.create_task(actor.run())
    yield actor
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_messages_are_handled_in_order(doubler: Doubler) -> None:
    for number in (1, 2, 3):
        doubler.tell(number)
    assert await doubler.ask(4, 5.0) == 8
    assert doubler.heard == [1, 2, 3, 4]
    assert doubler.mailbox_size == 0


async def test_answers_go_to_who_asked(doubler: Doubler) -> None:
    assert await asyncio.gather(*(doubler.ask(number, 5.0) for number in range(1, 6))) == [2, 4, 6, 8, 10]


async def test_full_mailbox_refuses_tell_and_ask() -> None:
    actor = Doubler(mailbox_limit=2)
    actor.tell(1)
    actor.tell(2)
    with pytest.raises(MailboxFullError, match=r"doubler is full \(2 messages\)"):
        actor.tell(3)
    with pytest.raises(MailboxFullError):
        await actor.ask(3, 5.0)
    assert actor.mailbox_size == 2


async def test_answer_that_does_not_come_in_time(doubler: Doubler) -> None:
    with pytest.raises(AskTimeoutError, match=r"doubler did not answer within 0\.01 s"):
        await doubler.ask(101, 0.01)


async def test_answer_that_comes_too_late_harms_nobody() -> None:
    actor = Doubler()
    with pytest.raises(AskTimeoutError):
        await actor.ask(1, 0.0)
    task = asyncio.create_task(actor.run())
    assert await actor.ask(2, 5.0) == 4
    task.cancel()


async def test_refusal_reaches_the_asker_only(doubler: Doubler) -> None:
    with pytest.raises(InvalidRequestError, match="-1 is negative"):
        await doubler.ask(-1, 5.0)
    assert await doubler.ask(1, 5.0) == 2


@pytest.mark.parametrize(("message", "error"), [(0, ZeroDivisionError), (-1, InvalidRequestError)])
async def test_error_that_no_asker_hears_ends_the_actor(message: int, error: type[Exception]) -> None:
    actor = Doubler()
    actor.tell(message)
    with pytest.raises(error):
        await actor.run()


async def test_defect_ends_the_actor_even_when_asked() -> None:
    actor = Doubler()
    asker = asyncio.create_task(actor.ask(0, 0.05))
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        await actor.run()
    with pytest.raises(AskTimeoutError):
        await asker


async def test_at_rest_only_while_it_waits_and_nothing_waits_for_it(doubler: Doubler) -> None:
    await doubler.ask(1, 5.0)
    assert doubler.is_at_rest
    doubler.tell(1)
    assert not doubler.is_at_rest
    await doubler.ask(2, 5.0)
    assert doubler.is_at_rest


async def test_fault_of_a_turn_taken_at_its_rest_ends_it() -> None:
    actor = Doubler()
    task = asyncio.create_task(actor.run())
    actor.fail(LookupError("what was to be there is not"))
    with pytest.raises(LookupError):
        await asyncio.wait_for(task, 5.0)
