"""The engine's end of a control socket, for tests of the runtime's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import zmq

from dynrt.engines.address import connect_dealer
from dynrt.runtime.messages import FromEngine, ToEngine, decode_to_engine, encode

DEADLINE_S = 20.0


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Until it holds; fails after DEADLINE_S."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - what is awaited tells nobody
                await asyncio.sleep(1e-3)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_S:g} s: {what}")


class ZmqEngine:
    """Reads only when told to."""

    def __init__(self, address: str, incarnation: str) -> None:
        self._context = zmq.Context()
        self.socket = connect_dealer(self._context, address, incarnation)

    def send(self, message: FromEngine) -> None:
        self.socket.send(encode(message))

    def take(self) -> list[ToEngine]:
        """All that has arrived."""
        messages: list[ToEngine] = []
        while self.socket.poll(0):
            messages.append(decode_to_engine(self.socket.recv()))
        return messages

    def close(self) -> None:
        self._context.destroy(linger=0)
