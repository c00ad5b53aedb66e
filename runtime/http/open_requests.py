"""The generation requests that are being served: refuses new ones while draining, and can cut off the rest."""

from __future__ import annotations

import asyncio
from types import TracebackType

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

    def admit(self) -> Admission:
        """Raises OverloadedError at once while draining, and out of the body when `drain` runs out of time."""
        if self.draining:
            raise _ending("takes no new requests")
        return Admission(self)

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

    def enter(self, cut: asyncio.Timeout) -> None:
        self._cuts.add(cut)
        self._idle.clear()

    def leave(self, cut: asyncio.Timeout) -> None:
        self._cuts.discard(cut)
        if not self._cuts:
            self._idle.set()


class Admission:
    """See OpenRequests.admit; a generator would cost every request some more."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self._cut = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._cut.__aenter__()
        self._requests.enter(self._cut)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.leave(self._cut)
        try:
            await self._cut.__aexit__(kind, error, trace)
        except TimeoutError:  # by the cut: the body's own is not raised here
            raise _ending("could not finish this request in time") from None


def _ending(what: str) -> OverloadedError:
    return OverloadedError(
        f"the server is shutting down and {what}; send it again in {RETRY_AFTER_DRAIN_S} s, or to another server",
        retry_after_s=RETRY_AFTER_DRAIN_S,
    )


OPEN_REQUESTS = web.AppKey("open_requests", OpenRequests)
