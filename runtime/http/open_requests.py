"""The generation requests that are being served: refuses new ones while draining, and can cut off the rest."""

from __future__ import annotations

import asyncio
from types import TracebackType

import msgspec

from dynrt.runtime.errors import OverloadedError

RETRY_AFTER_DRAIN_S = 5


class OpenRequests:
    """One per endpoint. `admit` frames a request; `drain` waits for all of them, then ends them."""

    def __init__(self) -> None:
        self.ending = False  # announced: new requests are still taken
        self.draining = False
        self.open: set[Admission] = set()
        self._idle = asyncio.Event()  # once none is left while draining

    def __len__(self) -> int:
        return len(self.open)

    def admit(self, task: asyncio.Task[None]) -> Admission:
        """Of a request that `task` serves.

        Raises OverloadedError at once while draining, and out of the body when `drain` runs out of time.
        """
        if self.draining:
            raise _ending("takes no new requests")
        return Admission(self, task)

    async def drain(self, drain_s: float) -> None:
        """Admit nothing more, wait up to `drain_s` for the open requests, cut those that are left."""
        self.draining = True
        self.look()
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            for admission in self.open:
                admission.cut()

    def look(self) -> None:
        """Notice whether the last one has left."""
        if not self.open:
            self._idle.set()


class Admission(msgspec.Struct, eq=False):
    """See OpenRequests.admit. A cut works as asyncio.timeout does, which costs every request several times as much."""

    requests: OpenRequests
    task: asyncio.Task[None]
    is_cut: bool = False

    def __enter__(self) -> None:
        self.requests.open.add(self)

    def cut(self) -> None:
        self.is_cut = True
        self.task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.requests.open.discard(self)
        if self.requests.draining:
            self.requests.look()
        if self.is_cut:
            is_ours_alone = self.task.uncancel() == 0  # else the client has left as well
            if is_ours_alone and kind is asyncio.CancelledError:
                raise _ending("could not finish this request in time") from None


def _ending(what: str) -> OverloadedError:
    return OverloadedError(
        f"the server is shutting down and {what}; send it again in {RETRY_AFTER_DRAIN_S} s, or to another server",
        retry_after_s=RETRY_AFTER_DRAIN_S,
    )
