"""The control socket, over real ZeroMQ: order, bursts, engines that read nothing, keys, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from zmq_engine import ZmqEngine, eventually

from dynrt.engines.address import connect_dealer
from dynrt.runtime import zmq_channel
from dynrt.runtime.errors import ConfigError, MailboxFullError
from dynrt.runtime.messages import (
    FromEngine,
    Goodbye,
    Heartbeat,
    SamplingParams,
    StatusRequest,
    Submit,
    ToEngine,
    encode,
)
from dynrt.runtime.zmq_channel import ZmqChannel

BURST = 10_000
TRANSPORTS = {"ipc": None, "tcp": "tcp://127.0.0.1:*"}

Received = list[tuple[str, FromEngine]]


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS)
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[ZmqChannel]:
    channel = ZmqChannel(request.param)
    yield channel
    channel.close()


@pytest.fixture
async def ipc_channel() -> AsyncIterator[ZmqChannel]:
    channel = ZmqChannel()
    yield channel
    channel.close()


@pytest.fixture
def connect() -> Iterator[Callable[[ZmqChannel, str], ZmqEngine]]:
    engines: list[ZmqEngine] = []

    def connect(channel: ZmqChannel, incarnation: str) -> ZmqEngine:
        engines.append(ZmqEngine(channel.address, incarnation))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


Connect = Callable[[ZmqChannel, str], ZmqEngine]


def opened(channel: ZmqChannel) -> Received:
    received: Received = []
    channel.open(lambda incarnation, message: received.append((incarnation, message)))
    return received


async def taken(engine: ZmqEngine, count: int) -> list[ToEngine]:
    """The first `count` messages that it gets."""
    messages: list[ToEngine] = []

    def take() -> bool:
        messages.extend(engine.take())
        return len(messages) >= count

    await eventually(take, f"{count} messages arrive")
    return messages


def large(number: int) -> Submit:
    """A message that a socket holds only some thousands of."""
    return Submit(bytes(16), number, "generate", bytes(4096), SamplingParams(1))


async def test_messages_keep_their_order_in_both_directions(channel: ZmqChannel, connect: Connect) -> None:
    received = opened(channel)
    engines = {name: connect(channel, name) for name in ("a", "b")}
    for number in range(500):
        for name, engine in engines.items():
            engine.send(Goodbye(name, str(number)))
    await eventually(lambda: len(received) == 1000, "all arrive")
    for name in engines:
        mine = [message for sender, message in received if sender == name]
        assert mine == [Goodbye(name, str(number)) for number in range(500)]
    for number in range(500):
        for name in engines:
            channel.send(name, StatusRequest(number))
    for engine in engines.values():
        assert await taken(engine, 500) == [StatusRequest(number) for number in range(500)]


async def test_burst_is_drained_while_answers_are_sent(channel: ZmqChannel, connect: Connect) -> None:
    """The descriptor is edge-triggered: an edge that a send consumed must not leave messages unread."""
    received: Received = []

    def answer(incarnation: str, message: FromEngine) -> None:
        received.append((incarnation, message))
        channel.send(incarnation, StatusRequest(len(received)))

    channel.open(answer)
    engine = connect(channel, "a")
    messages = [Goodbye("a", str(number)) for number in range(BURST)]
    answers: list[object] = []

    def talk() -> None:
        for message in messages:
            engine.send(message)
        while len(answers) < BURST and engine.socket.poll(10_000):
            answers.extend(engine.take())

    await asyncio.to_thread(talk)
    assert [message for _, message in received] == messages
    assert answers == [StatusRequest(number + 1) for number in range(BURST)]


async def test_engine_that_does_not_read_gets_all_in_order_later(
    channel: ZmqChannel, connect: Connect
) -> None:
    received = opened(channel)
    engine = connect(channel, "slow")
    engine.send(Heartbeat("slow", 0.0))
    await eventually(lambda: len(received) == 1, "it is connected")
    sent = 0
    while channel.backlog() < 100:
        channel.send("slow", large(sent))
        await asyncio.sleep(0)  # what is sent in one turn of the loop is one message
        sent += 1
    assert await taken(engine, sent) == [large(number) for number in range(sent)]
    assert channel.backlog() == 0


async def test_full_outbox_is_told_and_forgotten_with_the_engine(
    ipc_channel: ZmqChannel, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_channel, "OUTBOX_LIMIT", 50)
    received = opened(ipc_channel)
    connect(ipc_channel, "hung").send(Heartbeat("hung", 0.0))
    other = connect(ipc_channel, "other")
    other.send(Heartbeat("other", 0.0))
    await eventually(lambda: len(received) == 2, "both are connected")
    with pytest.raises(MailboxFullError, match="hung has not taken 50 messages"):
        for number in range(100_000):
            ipc_channel.send("hung", large(number))
            await asyncio.sleep(0)
    assert ipc_channel.backlog() == 50
    ipc_channel.send("other", StatusRequest(1))
    await eventually(lambda: other.take() == [StatusRequest(1)], "others are served")
    ipc_channel.forget("hung")
    assert ipc_channel.backlog() == 0


async def test_message_to_an_engine_that_is_not_there_is_dropped(ipc_channel: ZmqChannel) -> None:
    opened(ipc_channel)
    ipc_channel.send("nobody", StatusRequest(1))
    await eventually(lambda: ipc_channel.backlog() == 0, "it is not kept")


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\xc1"], [b"\x81\xa4type\xa5Never"], [b"\xff" * 1000], [b"two", b"frames"]],
    ids=["empty", "no MessagePack", "unknown type", "noise", "two frames"],
)
async def test_unreadable_message_is_logged_and_dropped(
    ipc_channel: ZmqChannel, connect: Connect, caplog: pytest.LogCaptureFixture, frames: list[bytes]
) -> None:
    received = opened(ipc_channel)
    engine = connect(ipc_channel, "a")
    with caplog.at_level(logging.WARNING, "dynrt.channel"):
        engine.socket.send_multipart(frames)
        engine.send(Heartbeat("a", 0.0))
        await eventually(lambda: len(received) == 1, "the next message is read")
    assert [record.message for record in caplog.records] == ["unreadable message"]


async def test_heartbeat_socket_speaks_for_its_engine(ipc_channel: ZmqChannel, connect: Connect) -> None:
    received = opened(ipc_channel)
    connect(ipc_channel, "a.hb").send(Heartbeat("a", 0.5))
    await eventually(lambda: received == [("a", Heartbeat("a", 0.5))], "it came under the engine's name")


async def test_directory_is_private_and_removed(ipc_channel: ZmqChannel) -> None:
    opened(ipc_channel)
    directory = Path(ipc_channel.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    ipc_channel.close()
    assert not directory.exists()


async def test_nothing_is_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        channel = ZmqChannel()
        opened(channel)
        channel.send("nobody", StatusRequest(1))
        channel.close()
    assert descriptors() == before


@pytest.mark.parametrize(
    "address", ["nonsense", "tcp://no-such-host.invalid:1", "ipc:///no/such/directory/x"]
)
async def test_address_that_cannot_be_bound_is_told(address: str) -> None:
    channel = ZmqChannel(address)
    with pytest.raises(
        ConfigError, match=r"cannot listen for engines at .*; choose another --control address"
    ):
        opened(channel)
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(10.0)
    assert not closing.is_alive(), "close waits for a socket that nobody closes"


@contextmanager
def plain_dealer(endpoint: str, identity: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.IDENTITY, identity.encode())
    dealer.connect(endpoint)
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


async def test_tcp_refuses_who_does_not_know_the_key(connect: Connect) -> None:
    channel = ZmqChannel("tcp://127.0.0.1:*")
    try:
        received = opened(channel)
        endpoint, _, key = channel.address.partition("#")
        assert len(key) == 40
        with plain_dealer(endpoint, "stranger") as stranger:
            stranger.send(encode(Heartbeat("stranger", 0.0)))
            for number in range(20):  # time enough for the stranger's message, if it were let in
                connect(channel, f"friend-{number}").send(Heartbeat(f"friend-{number}", 0.0))
                await eventually(lambda n=number: len(received) > n, "who knows the key is heard")
        assert {sender.split("-")[0] for sender, _ in received} == {"friend"}
    finally:
        channel.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:5555", "lacks the runtime's key"),
        ("nonsense", "is no address"),
    ],
)
def test_engine_refuses_an_address_that_cannot_be_one(address: str, message: str) -> None:
    context = zmq.Context()
    try:
        with pytest.raises(ConfigError, match=message):
            connect_dealer(context, address, "a")
    finally:
        context.destroy(linger=0)
