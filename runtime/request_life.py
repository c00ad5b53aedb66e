"""The life of one request: planned, submitted, streamed, moved when its workers fail, ended everywhere."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from dynrt.runtime.attempt import Arrival, Attempt, AttemptError, NoRoomError
from dynrt.runtime.errors import NoWorkerError, WorkerLostError
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
from dynrt.runtime.request_times import RequestTimes
from dynrt.runtime.requests import FrameSink, GenerateOutput, GenerateRequest, LocalPrefill

log = logging.getLogger("dynrt.request")

LEASE_S = 30.0


class Route(msgspec.Struct, frozen=True):
    """Whom the planner chose: incarnations, the same twice for local prefill."""

    prefill: str
    decode: str
    first_token_from: Literal["prefill", "decode"] = "prefill"
    kv_connector: KvConnector = "layerwise"


class Placement(Protocol):
    """What a request needs of the runtime."""

    async def plan(self, life: RequestLife, exclude: frozenset[str]) -> Route:
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
    ) -> None:
        self.key = key
        self.request = request
        self.sampling = sampling
        self.local_prefill = local_prefill
        self.finish_reason: FinishReason | None = None
        self.is_admitted = False  # from its first plan on: it may move, but is not turned away any more
        self.cached_tokens: int | None = None
        self.times = RequestTimes(asyncio.get_running_loop().time())
        self.passage = Passage(self.times, sink)
        self.had_output = False
        self._placement = placement
        self._epochs = itertools.count()
        self._without_room: frozenset[str] = frozenset()  # decode workers, for the prompt computed last

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def output_ids(self) -> array[int]:
        return self.passage.output_ids

    @property
    def known_ids(self) -> bytes:
        """Prompt and output so far, packed: what the next attempt has to prefill."""
        return self.request.prompt_ids + pack_ids(self.output_ids)

    async def outputs(
        self, max_attempts: int, no_worker_wait_s: float
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Until it is finished. Raises DynrtError; closing it early cancels the request everywhere."""
        excluded: frozenset[str] = frozenset()
        reason = ""
        for _ in range(max_attempts):
            self._attempt = await self._start(excluded, no_worker_wait_s)
            try:
                while not self.finished:
                    output = self._absorb(await self._arrivals())
                    self.finish_reason = output.finish_reason
                    yield output
                return
            except AttemptError as failure:
                reason = failure.reason
                excluded = frozenset({failure.lost} if failure.lost else ())
                trace = trace_fields(self.request.traceparent)
                log.warning(
                    "request moves", extra={"request": self.request.request_id, "reason": reason, **trace}
                )
            finally:
                self._placement.close_attempt(self._attempt, self.finished, reason or "the client left")
        raise WorkerLostError(f"gave up after {max_attempts} attempts: {reason}")

    async def _start(self, excluded: frozenset[str], no_worker_wait_s: float) -> Attempt:
        route = await self._plan(excluded, no_worker_wait_s)
        self.is_admitted = True
        self._without_room = frozenset()
        attempt = self._attempt_on(route)
        if attempt.is_remote and route.kv_connector == "nixl-pull":
            attempt.pull = self._submit(attempt, "generate")
        self._placement.open_attempt(attempt)
        if attempt.is_remote:
            # Prefill starts computing at once; it does not wait for the reservation.
            self._placement.tell(route.prefill, self._submit(attempt, "prefill"))
        if attempt.is_pushed:
            self._placement.tell(route.decode, self._submit(attempt, "reserve"))
        elif not attempt.is_remote:
            self._placement.tell(route.decode, self._submit(attempt, "generate"))
        return attempt

    def _attempt_on(self, route: Route) -> Attempt:
        return Attempt(
            self.key,
            next(self._epochs),
            route.prefill,
            route.decode,
            self.passage.chars_sent,
            route.first_token_from,
            len(self.output_ids),
            self.passage,
        )

    async def _move_on(self, held: Attempt) -> Attempt:
        """To another decode worker, or on the prefill worker itself, which has the KV of all of the prompt."""
        self._without_room |= {held.decode}
        route = await self._placement.plan_move(self, held, self._without_room)
        is_local = route.decode == held.prefill
        attempt = self._attempt_on(route) if is_local else held.moved(next(self._epochs), route.decode)
        attempt.inherit(held)
        self._placement.move_attempt(held, attempt)
        self._placement.tell(attempt.decode, self._submit(attempt, "generate" if is_local else "reserve"))
        return attempt

    async def _plan(self, excluded: frozenset[str], wait_s: float) -> Route:
        """Waits a moment for a worker that is being restarted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            try:
                return await self._placement.plan(self, excluded)
            except NoWorkerError:
                left_s = deadline - loop.time()
                if left_s <= 0:
                    raise
                await self._placement.wait_for_change(left_s)

    def _submit(self, attempt: Attempt, purpose: Purpose) -> Submit:
        return Submit(
            key=attempt.key,
            epoch=attempt.epoch,
            purpose=purpose,
            prompt_ids=self.request.prompt_ids,
            sampling=self.sampling,
            output_ids=pack_ids(self.output_ids[: attempt.outputs_sent]),
            chars_emitted=attempt.chars_sent,
            salt=self.request.salt,
            lease_s=LEASE_S,
            peer=attempt.prefill if attempt.is_remote else "",
            frame=self.request.frame,
            traceparent=self.request.traceparent,
        )

    async def _arrivals(self) -> list[Arrival]:
        """What has come; from another decode worker, if this one has no room."""
        while True:
            try:
                return await self._attempt.read()
            except NoRoomError:
                self._attempt = await self._move_on(self._attempt)

    def _absorb(self, arrivals: list[Arrival]) -> GenerateOutput:
        """Note what came, so that the request can go on elsewhere from here."""
        token_ids: list[int] = []
        for arrival in arrivals:
            self._note_cached(arrival)
            token_ids.extend(arrival.delta.token_ids)
            self.passage.note(arrival.delta)
        last = arrivals[-1].delta
        text = "".join(arrival.delta.text for arrival in arrivals)
        return GenerateOutput(
            token_ids,
            text,
            last.finish_reason,
            last.stop_reason,
            self.cached_tokens or 0,
            _joined(arrivals),
            arrivals[0].delta.prompt_logprobs,
            b"".join(arrival.delta.frames for arrival in arrivals),
        )

    def _note_cached(self, arrival: Arrival) -> None:
        cached_tokens = arrival.delta.cached_tokens
        if cached_tokens is None:
            return
        num_tokens = len(self.known_ids) // 4
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens
            self._placement.prompt_seen(num_tokens, cached_tokens)


def _joined(arrivals: list[Arrival]) -> list[TokenLogprob] | None:
    """Their log probabilities in order; None where they were not asked for."""
    parts = [arrival.delta.logprobs for arrival in arrivals]
    if None in parts:
        return None
    return [logprob for part in parts if part is not None for logprob in part]
