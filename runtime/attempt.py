"""One attempt at a request on one plan's workers: what they said about it, waiting to be read."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import msgspec

from dynrt.runtime.errors import DynrtError, EngineError
from dynrt.runtime.messages import StepTiming, TokenDelta
from dynrt.transfer.events import FirstToken


class AttemptError(Exception):
    """This attempt is over without a result; another may be made."""

    def __init__(self, reason: str, lost: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lost = lost  # the incarnation that was lost, if that was why


class Arrival(msgspec.Struct, frozen=True):
    """A delta, with the worker that sent it."""

    delta: TokenDelta
    incarnation: str
    timing: StepTiming | None


class Attempt:
    """Bounded by max_tokens: a reader that is slow finds what came meanwhile, all at once."""

    def __init__(self, key: bytes, epoch: int, prefill: str, decode: str, chars_sent: int) -> None:
        self.key = key
        self.epoch = epoch
        self.prefill = prefill  # incarnations; the same for a local plan
        self.decode = decode
        self.chars_sent = chars_sent  # by earlier attempts
        self.first_token_at: float | None = None  # on the clock of prefill's host, when it was sampled
        self.received_at: float | None = None  # on the same clock, when decode had all KV
        self.first_step: StepTiming | None = None  # decode's, that brought its first own token
        self._has_begun = False
        self._arrivals: list[Arrival] = []
        self._failure: AttemptError | DynrtError | None = None
        self._news = asyncio.Event()

    @property
    def id(self) -> tuple[bytes, int]:
        return self.key, self.epoch

    @property
    def is_remote(self) -> bool:
        return self.prefill != self.decode

    @property
    def has_begun(self) -> bool:
        """A token has been sampled for it."""
        return self._has_begun

    def arrive(self, arrival: Arrival) -> None:
        self._has_begun = True
        if self.first_token_at is None and arrival.timing is not None:
            self.first_token_at = arrival.timing.ended_at
        if self.is_remote and arrival.incarnation == self.decode and self.first_step is None:
            self.first_step = arrival.timing
        if arrival.delta.finish_reason == "error":
            self.fail(EngineError(arrival.delta.error or "the engine failed"))
            return
        self._arrivals.append(arrival)
        self._news.set()

    def first_token(self, arrival: Arrival) -> FirstToken | None:
        """What decode must know of this arrival: the one token from prefill, if the request goes on behind it."""
        delta = arrival.delta
        if not self.is_remote or arrival.incarnation != self.prefill or delta.finish_reason is not None:
            return None
        assert len(delta.token_ids) == 1, "prefill samples exactly one token"
        return FirstToken(self.key, self.epoch, delta.token_ids[0], self.chars_sent + len(delta.text))

    def fail(self, failure: AttemptError | DynrtError) -> None:
        """Read after everything that arrived before."""
        if self._failure is None:
            self._failure = failure
        self._news.set()

    def worker_lost(self, incarnation: str, reason: str) -> None:
        if incarnation == self.decode:
            self.fail(AttemptError(f"its decode worker was lost: {reason}", incarnation))
        elif incarnation == self.prefill and not self._has_begun:
            self.fail(AttemptError(f"its prefill worker was lost: {reason}", incarnation))
        # A prefill worker lost later: the decode end knows whether it had everything, and says so.

    async def read(self) -> list[Arrival]:
        """Everything that arrived since the last read, at least one. Raises what the attempt failed with."""
        await self._news.wait()
        self._news.clear()
        if not self._arrivals:
            self._raise_failure()
        arrivals, self._arrivals = self._arrivals, []
        if self._failure is not None:
            self._news.set()
        return arrivals

    def _raise_failure(self) -> NoReturn:
        assert self._failure is not None, "news without arrival or failure"
        raise self._failure
