"""The life of one request: planned, submitted, streamed, moved when its workers fail, ended everywhere."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from typing import Literal, Protocol

import msgspec

from dynrt.runtime.attempt import Arrival, Attempt, AttemptError, NoRoomError
from dynrt.runtime.errors import NoWorkerError, WorkerLostError
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.logs import trace_fields
from dynrt.runtime.messages import (
    FinishReason,
    KvConnector,
    Purpose,
    SamplingParams,
    Submit,
    ToEngine,
    TokenLogprob,
    pack_ids,
)
from dynrt.runtime.passage import Passage
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, LocalPrefill

log = logging.getLogger("dynrt.request")

LEASE_S = 30.0
# Before a third attempt and any later one: workers that go down together are found one by one, and chosen until then.
SETTLE_S = 0.5


class Route(msgspec.Struct, frozen=True):
    """Whom the planner chose: incarnations, the same twice for local prefill."""

    prefill: str
    decode: str
    first_token_from: Literal["prefill", "decode"] = "prefill"
    kv_connector: KvConnector = "layerwise"


class Placement(Protocol):
    """What a request needs of the runtime."""

    def new_number(self) -> int:
        """For an attempt."""

    def plan(self, life: RequestLife, exclude: frozenset[str]) -> Awaitable[Route]:
        """Raises NoWorkerError."""

    async def plan_move(self, life: RequestLife, held: Attempt, tried: frozenset[str]) -> Route:
        """For a finished prompt for which the decode workers `tried` have no room.

        The prefill worker twice, if it must decode by itself. Raises OverloadedError, AttemptError.
        """

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until a worker or a pair comes, or so long."""

    def tell(self, incarnation: str, message: ToEngine) -> None: ...

    def open_attempt(self, attempt: Attempt) -> None: ...

    def move_attempt(self, held: Attempt, attempt: Attempt) -> None:
        """The finished prompt of `held` goes on as `attempt`."""

    def close_attempt(self, attempt: Attempt, finished: bool, reason: str) -> None:
        """Whatever still runs for it ends, on every worker."""

    def prompt_seen(self, num_tokens: int, cached_tokens: int) -> None: ...


class RequestLife:
    """Keeps of an open request all that is needed to move it to other workers."""

    def __init__(
        self,
        key: bytes,
        request: GenerateRequest,
        sampling: SamplingParams,
        local_prefill: LocalPrefill,
        placement: Placement,
        sink: FrameSink | None = None,
        *,
        began_at: float,
        max_attempts: int,
        no_worker_wait_s: float,
    ) -> None:
        self.key = key
        self.request = request
        self.sampling = sampling
        self.local_prefill = local_prefill
        self.finish_reason: FinishReason | None = None
        self.is_admitted = False  # from its first plan on: it may move, but is not turned away any more
        self.cached_tokens: int | None = None
        self.passage = Passage(began_at, sink)
        self._placement = placement
        self._max_attempts = max_attempts
        self._no_worker_wait_s = no_worker_wait_s
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._epochs = itertools.count()
        self._reason = ""  # why the last attempt failed
        self._excluded: frozenset[str] = frozenset()  # workers lost with it
        self._without_room: frozenset[str] = frozenset()  # decode workers, for the prompt computed last

    @property
    def known_ids(self) -> bytes:
        """Prompt and output so far, packed: what the next attempt has to prefill."""
        output_ids = self.passage.output_ids
        return self.request.prompt_ids + pack_ids(output_ids) if output_ids else self.request.prompt_ids

    async def next(self) -> GenerateOutput:
        """What came since the last output, until one has a finish_reason. Raises DynrtError."""
        while True:
            if self._attempt is None:
                self._attempt = await self._start()
            try:
                return self._absorb(await self._attempt.read())
            except AttemptError as failure:
                await self._go_on(self._attempt, failure)

    def close(self) -> None:
        """It is finished, or nobody waits for it: whatever still runs for it ends."""
        if self._attempt is not None:
            is_finished = self.finish_reason is not None
            self._placement.close_attempt(self._attempt, is_finished, self._reason or "the client left")
            self._attempt = None

    async def _go_on(self, held: Attempt, failure: AttemptError) -> None:
        """With the finished prompt of the failed attempt, if it is only in want of room, else with another attempt."""
        if isinstance(failure, NoRoomError):
            try:
                self._attempt = await self._move_on(held)
                return
            except AttemptError as lost:
                failure = lost
        self._reason = failure.reason
        self._excluded = frozenset({failure.lost} if failure.lost else ())
        trace = trace_fields(self.request.traceparent)
        about = {"request": self.request.request_id, "reason": failure.reason, **trace}
        log.warning("request moves", extra=about)
        self.close()

    async def _start(self) -> Attempt:
        if self._num_attempts == self._max_attempts:
            raise WorkerLostError(f"gave up after {self._max_attempts} attempts: {self._reason}")
        if self._num_attempts > 1:
            await asyncio.sleep(SETTLE_S)
        self._num_attempts += 1
        try:
            route = await self._placement.plan(self, self._excluded)
        except NoWorkerError as failure:
            route = await self._plan_later(failure)
        self.is_admitted = True
        self._without_room = frozenset()
        attempt = self._attempt_on(route)
        if attempt.is_remote and route.kv_connector == "nixl-pull":
            attempt.pull = self._submit(attempt, "generate")
        self._placement.open_attempt(attempt)
        if not attempt.is_remote:
            self._placement.tell(route.decode, self._submit(attempt, "generate"))
            return attempt
        if attempt.is_pushed:
            # First, as it has the longer way: there, back, and to prefill, which meanwhile computes.
            self._placement.tell(route.decode, self._submit(attempt, "reserve"))
        self._placement.tell(route.prefill, self._submit(attempt, "prefill"))
        return attempt

    def _attempt_on(self, route: Route) -> Attempt:
        passage = self.passage
        return Attempt(
            self.key,
            next(self._epochs),
            route.prefill,
            route.decode,
            passage.chars_sent,
            route.first_token_from,
            len(passage.output_ids),
            passage,
            self._placement.new_number(),
        )

    async def _move_on(self, held: Attempt) -> Attempt:
        """To another decode worker, or on the prefill worker itself, which has the KV of all of the prompt."""
        self._without_room |= {held.decode}
        route = await self._placement.plan_move(self, held, self._without_room)
        is_local = route.decode == held.prefill
        if is_local:
            attempt = self._attempt_on(route)
        else:
            attempt = held.moved(next(self._epochs), route.decode, self._placement.new_number())
        attempt.inherit(held)
        self._placement.move_attempt(held, attempt)
        self._placement.tell(attempt.decode, self._submit(attempt, "generate" if is_local else "reserve"))
        return attempt

    async def _plan_later(self, failure: NoWorkerError) -> Route:
        """Waits a moment for a worker that is being restarted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._no_worker_wait_s
        while (left_s := deadline - loop.time()) > 0:
            await self._placement.wait_for_change(left_s)
            try:
                return await self._placement.plan(self, self._excluded)
            except NoWorkerError as again:
                failure = again
        raise failure

    def _submit(self, attempt: Attempt, purpose: Purpose) -> Submit:
        num_sent = attempt.outputs_sent
        return Submit(
            key=attempt.key,
            epoch=attempt.epoch,
            purpose=purpose,
            prompt_ids=self.request.prompt_ids,
            sampling=self.sampling,
            output_ids=pack_ids(self.passage.output_ids[:num_sent]) if num_sent else b"",
            chars_emitted=attempt.chars_sent,
            salt=self.request.salt,
            lease_s=LEASE_S,
            peer=attempt.prefill if attempt.is_remote else "",
            frame=self.request.frame,
            number=attempt.number,
            traceparent=self.request.traceparent,
        )

    def _absorb(self, arrivals: list[Arrival]) -> GenerateOutput:
        """Note what came, so that the request can go on elsewhere from here."""
        passage = self.passage
        for arrival in arrivals:
            delta = arrival.delta
            if delta.cached_tokens is not None and self.cached_tokens is None:
                self.cached_tokens = delta.cached_tokens
                num_tokens = len(self.request.prompt_ids) // 4 + len(passage.output_ids)
                self._placement.prompt_seen(num_tokens, delta.cached_tokens)
            passage.note(delta)
        self.finish_reason = arrivals[-1].delta.finish_reason
        return _output(arrivals, self.cached_tokens or 0)


def _output(arrivals: list[Arrival], cached_tokens: int) -> GenerateOutput:
    """All of them as one; nearly always there is just one."""
    first, last = arrivals[0].delta, arrivals[-1].delta
    token_ids, text, frames, logprobs = first.token_ids, first.text, first.frames, first.logprobs
    if len(arrivals) > 1:
        deltas = [arrival.delta for arrival in arrivals]
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        text = "".join([delta.text for delta in deltas])
        frames = b"".join([delta.frames for delta in deltas])
        logprobs = _joined([delta.logprobs for delta in deltas])
    return GenerateOutput(
        token_ids,
        text,
        last.finish_reason,
        last.stop_reason,
        cached_tokens,
        logprobs,
        first.prompt_logprobs,
        frames,
    )


def _joined(parts: list[list[TokenLogprob] | None]) -> list[TokenLogprob] | None:
    """Their log probabilities in order; None where they were not asked for."""
    if None in parts:
        return None
    return [logprob for part in parts if part is not None for logprob in part]
