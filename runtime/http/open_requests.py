"""The generation requests that are being served: refuses new ones while draining, and can cut off the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from dynrt.runtime.errors import OverloadedError

RETRY_AFTER_DRAIN_S = 5


class OpenRequests:
    """One per application. `admit` frames a request; `drain` waits for all of them, then ends them."""

    def __init__(self) -> None:
        self.ending = False  # announced: new requests are still taken
        self.draining = False
        self._cuts: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._cuts)

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Raises OverloadedError at once while draining, and out of the body when `drain` runs out of time."""
        if self.draining:
            raise _ending("takes no new requests")
        cut = asyncio.timeout(None)
        try:
            async with cut:
                self._enter(cut)
                yield
        except TimeoutError:
            if cut.expired():
                raise _ending("could not finish this request in time") from None
            raise
        finally:
            self._leave(cut)

    async def drain(self, drain_s: float) -> None:
        """Admit nothing more, wait up to `drain_s` for the open requests, cut those that are left."""
        self.draining = True
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            now = asyncio.get_running_loop().time()
            for cut in self._cuts:
                cut.reschedule(now)

    def _enter(self, cut: asyncio.Timeout) -> None:
        self._cuts.add(cut)
        self._idle.clear()

    def _leave(self, cut: asyncio.Timeout) -> None:
        self._cuts.discard(cut)
        if not self._cuts:
            self._idle.set()


def _ending(what: str) -> OverloadedError:
    return OverloadedError(
        f"the server is shutting down and {what}; send it again in {RETRY_AFTER_DRAIN_S} s, or to another server",
        retry_after_s=RETRY_AFTER_DRAIN_S,
    )


OPEN_REQUESTS = web.AppKey("open_requests", OpenRequests)
