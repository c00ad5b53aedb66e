"""The reference to an engine: questions with a deadline, and no answer from the dead."""

from __future__ import annotations

import asyncio

import pytest
from registrations import NotingChannel, registration

from dynrt.runtime.errors import AskTimeoutError, MailboxFullError, NoWorkerError
from dynrt.runtime.messages import EngineLoad, Status, StatusRequest
from dynrt.runtime.worker import Worker


@pytest.fixture
def channel() -> NotingChannel:
    return NotingChannel()


@pytest.fixture
def worker(channel: NotingChannel) -> Worker:
    return Worker("d", registration("inc", "decode"), channel, None, 0.0)


def status(token: int) -> Status:
    return Status(token, EngineLoad(), 0, 0, 0, 0, 0)


async def test_each_answer_meets_its_question(worker: Worker, channel: NotingChannel) -> None:
    first, second = asyncio.create_task(worker.ask(5.0)), asyncio.create_task(worker.ask(5.0))
    await asyncio.sleep(0)
    assert channel.take() == [("inc", StatusRequest(1)), ("inc", StatusRequest(2))]
    for token in (2, 1, 1, 99):
        worker.answered(status(token))
    assert await first == status(1)
    assert await second == status(2)


async def test_no_answer_in_time(worker: Worker) -> None:
    with pytest.raises(AskTimeoutError, match=r"worker d did not answer within 0\.01 s"):
        await worker.ask(0.01)
    worker.answered(status(1))  # too late, and no harm


async def test_whoever_asks_hears_of_its_end(worker: Worker) -> None:
    question = asyncio.create_task(worker.ask(5.0))
    await asyncio.sleep(0)
    worker.left()
    with pytest.raises(NoWorkerError, match="worker d has ended"):
        await question


async def test_full_outbox_is_told(worker: Worker, channel: NotingChannel) -> None:
    channel.full.add("inc")
    with pytest.raises(MailboxFullError):
        await worker.ask(5.0)
