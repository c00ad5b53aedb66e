"""The attempts under way: which workers each runs on, what arrives for it, and how it ends everywhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from dynrt.planner.plan import PlanRequest
from dynrt.runtime.attempt import Arrival, Attempt, AttemptError
from dynrt.runtime.errors import DynrtError, EngineError, InvalidRequestError, NoWorkerError, OverloadedError
from dynrt.runtime.fleet import Fleet
from dynrt.runtime.host import host_id
from dynrt.runtime.messages import Cancel, StepReport, ToEngine, TokenDelta
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.passage import Passage, pass_on
from dynrt.runtime.planning import Exposed, PlannerActor, Pushed
from dynrt.runtime.request_life import RequestLife, Route
from dynrt.runtime.request_metrics import EndedRequest, RequestOutcome
from dynrt.runtime.request_times import StageTimes
from dynrt.runtime.tracing import Trace
from dynrt.runtime.transfer_manager import Abandon, Computed, Gone, Move, Open, TransferManager
from dynrt.runtime.worker import Worker
from dynrt.transfer.events import Sent
from dynrt.transfer.ledger_effects import Decided

PLAN_TIMEOUT_S = 10.0
MOVES_LIMIT = 3  # other decode workers that are asked to take a finished prompt, a second each


class Attempts:
    """What every RequestLife needs of the runtime (request_life.Placement), and what it is told in return.

    `tell` sends to a worker by incarnation; `changed` waits for a worker or a pair to come or go.
    """

    def __init__(
        self,
        fleet: Fleet,
        planner: PlannerActor,
        metrics: Metrics,
        tell: Callable[[str, ToEngine], None],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._planner = planner
        self._metrics = metrics
        self.tell = tell
        self._changed = changed
        self._computed_tokens = metrics.prefill_tokens.labels("computed")
        self._cached_tokens = metrics.prefill_tokens.labels("cached")
        self._attempts: dict[tuple[bytes, int], Attempt] = {}
        self._passages: dict[int, Passage] = {}  # by the attempt's number
        self._numbers = itertools.count(1)
        self._now = asyncio.get_running_loop().time
        self.open_requests = 0
        self.transfers: TransferManager

    # --- news of them -----------------------------------------------------------------------------

    def step(self, worker: Worker, report: StepReport) -> int:
        """What a step brought to its requests. Returns how many tokens of it clients get."""
        timing = report.timing if worker.is_here else None
        ended_at = self._now() if timing is None else timing.ended_at
        unread, last_token_at = pass_on(self._passages, report.texts, ended_at)
        num_tokens = len(last_token_at)
        for delta in unread + report.deltas:
            attempt = self._attempts.get((delta.key, delta.epoch))
            if attempt is None:
                continue  # ended meanwhile
            if self._deliver(worker, attempt, delta, report, ended_at):
                num_tokens += len(delta.token_ids)
                before = attempt.passage.come(ended_at)
                if before is not None:
                    last_token_at.append(before)
        self._metrics.requests.tokens_followed(ended_at, last_token_at)
        return num_tokens

    def _deliver(
        self, worker: Worker, attempt: Attempt, delta: TokenDelta, report: StepReport, ended_at: float
    ) -> bool:
        """To the attempt's reader. Returns whether the client gets tokens of it."""
        if not attempt.has_begun:
            self._planner.first_token(delta.key)
        arrival = Arrival(delta, worker.incarnation, report.timing)
        is_of_prompt = delta.cached_tokens is not None and worker.incarnation == attempt.prefill
        if is_of_prompt and attempt.stage.computed_at is None:
            _note_prefill(attempt.stage, worker, arrival, ended_at)
        num_tokens = attempt.arrive(arrival)
        if attempt.is_remote:
            self._go_on_handing_off(attempt, arrival)
        elif attempt.holds is not None:
            self._let_go(attempt, "its prefill worker decodes on by itself")
        return num_tokens > 0

    def _go_on_handing_off(self, attempt: Attempt, arrival: Arrival) -> None:
        if attempt.pull is not None:
            self._go_on_pulling(attempt, arrival)
        elif attempt.computes(arrival):
            has_choice = self._fleet.has_other_decode(attempt.prefill, attempt.decode)
            self.transfers.tell(Computed(*attempt.id, has_choice))
        first = attempt.first_token(arrival)
        if first is not None:
            self.transfers.tell(first)
        if attempt.is_pushed and not attempt.times.is_complete:
            self._observe_handoff(attempt)

    def _go_on_pulling(self, attempt: Attempt, arrival: Arrival) -> None:
        """The ledger knows nothing of it: decode says by what it had to compute how the handoff came out."""
        pull = attempt.pull_behind(arrival)
        if pull is not None:
            self.tell(attempt.decode, pull)
        was_pulled = attempt.was_pulled(arrival)
        if was_pulled is not None:
            self._metrics.handoffs.labels("committed" if was_pulled else "failed").inc()

    def pushed(self, prefill: str, sent: Sent) -> None:
        """A prefill end has sent all of a prompt."""
        self._metrics.kv_bytes_pushed.inc(sent.kv_bytes)
        attempt = self._attempts.get(sent.id)
        if attempt is not None:
            attempt.stage.kv_bytes, attempt.stage.link_s = sent.kv_bytes, sent.link_s
        if attempt is not None and sent.kv_bytes:
            self._planner.tell(Pushed(prefill, attempt.decode, sent.kv_bytes, sent.link_s))

    def worker_lost(self, incarnation: str, reason: str) -> None:
        """Whatever ran there must go elsewhere."""
        for attempt in list(self._attempts.values()):
            attempt.worker_lost(incarnation, reason)

    def on_decided(self, decided: Decided) -> None:
        """A handoff came to its outcome."""
        self._metrics.handoffs.labels(decided.outcome).inc()
        if decided.cause is not None:
            self._metrics.handoff_failures.labels(decided.cause).inc()
        attempt = self._attempts.get(decided.id)
        if attempt is None:
            return
        if decided.cause == "checksum":  # not tried again: whoever asked for checksums wants to know
            attempt.fail(EngineError(f"its KV arrived corrupted and was not used: {decided.reason}"))
        elif decided.cause == "unfit":
            attempt.fail(InvalidRequestError(decided.reason))
        elif decided.cause == "no_room":
            attempt.no_room(decided.reason)
        elif decided.outcome != "committed":
            attempt.fail(AttemptError(f"its handoff {decided.outcome}: {decided.reason}"))
        else:
            self._note_received(attempt, decided)

    def _note_received(self, attempt: Attempt, decided: Decided) -> None:
        """To the handoff's own times only where both ends read the same clock."""
        attempt.stage.received_at = decided.received_at if decided.host == host_id() else self._now()
        prefill = self._fleet.get(attempt.prefill)
        if prefill is not None and prefill.register.host == decided.host:
            attempt.times.received_at = decided.received_at
            self._observe_handoff(attempt)

    def _observe_handoff(self, attempt: Attempt) -> None:
        exposed_s = attempt.times.take_exposed_s()
        if exposed_s is not None:
            self._metrics.handoff_exposed_s.observe(exposed_s)
            self._planner.tell(Exposed(exposed_s))
        start = attempt.times.take_decode_start()
        if start is not None:
            self._metrics.decode_wait_s.observe(start.wait_s)
            self._metrics.decode_first_step_s.observe(start.step_s)
            self._metrics.first_decode_s.observe(start.total_s)

    # --- for requests -----------------------------------------------------------------------------

    def request_ended(self, life: RequestLife, trace: Trace | None, failure: Exception | None) -> None:
        """Account for an open request; who has read the last output may well not ask for more."""
        self.open_requests -= 1
        unfinished: RequestOutcome = "cancelled" if failure is None else "failed"
        ended = EndedRequest(
            unfinished if life.finish_reason is None else "finished",
            life.finish_reason,
            life.passage.times(),
            self._now(),
            prompt_tokens=len(life.request.prompt_ids) // 4,
            output_tokens=len(life.passage.output_ids),
            max_tokens=life.sampling.max_tokens,
        )
        self._metrics.requests.ended(ended)
        if trace is not None:
            trace.end(ended, failure)

    def first_output(self, life: RequestLife) -> None:
        self._metrics.requests.ttft_s.observe(self._now() - life.passage.began_at)

    def new_number(self) -> int:
        return next(self._numbers)

    def plan(self, life: RequestLife, exclude: frozenset[str]) -> Awaitable[Route]:
        request = PlanRequest(
            life.key,
            life.request.salt,
            life.known_ids,
            life.sampling.max_tokens - len(life.passage.output_ids),
            life.local_prefill,
            exclude,
            life.is_admitted,
        )
        return self._route(request)

    async def plan_move(self, life: RequestLife, held: Attempt, tried: frozenset[str]) -> Route:
        """Where the finished prompt of `held` goes on: its prefill worker twice if it must decode by itself.

        Raises OverloadedError if it cannot, AttemptError if it is gone. `tried`: decode workers without room.
        """
        likes = {worker.incarnation for worker in self._fleet.decodes_like(held.prefill, held.decode)}
        allowed = likes - tried if len(tried) <= MOVES_LIMIT else set()
        request = PlanRequest(
            life.key,
            life.request.salt,
            life.known_ids,
            life.sampling.max_tokens - len(life.passage.output_ids),
            exclude=frozenset(worker.incarnation for worker in self._fleet) - allowed,
            is_admitted=True,
            prefilled_on=held.prefill,
        )
        try:
            return await self._route(request)
        except NoWorkerError as error:
            raise AttemptError(error.message) from error
        except OverloadedError:
            self._metrics.handoff_retargets.labels("rejected").inc()
            raise

    async def _route(self, request: PlanRequest) -> Route:
        try:
            plan = await self._planner.plan(request, PLAN_TIMEOUT_S)
        except BaseException:
            # Nobody waits for the plan any more, but it may have been made, or still be.
            self._planner.ended(request.key, finished=False)
            raise
        decode = self._fleet.get(plan.decode)
        if decode is None:
            return Route(plan.prefill, plan.decode)
        told = decode.register
        return Route(plan.prefill, plan.decode, told.first_token_from, told.kv_connector)

    async def wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed()
        except TimeoutError:
            return  # the caller looks at the clock itself

    def end_requests(self, error: DynrtError) -> None:
        """Whoever still reads a request learns that it will not go on."""
        for attempt in self._attempts.values():
            attempt.fail(error)

    def open_attempt(self, attempt: Attempt) -> None:
        self._admit(attempt)
        attempt.stage.planned_at = self._now()
        if attempt.epoch > 0:
            self._metrics.retries.inc()
        if attempt.is_pushed:
            self.transfers.tell(Open(attempt.key, attempt.epoch, attempt.prefill, attempt.decode))
        self._find_workers(attempt)

    def move_attempt(self, held: Attempt, attempt: Attempt) -> None:
        """The finished prompt of `held` goes on as `attempt`: elsewhere, or on its prefill worker."""
        self._remove(held)
        self._admit(attempt)
        held.stage.ended_at = attempt.stage.planned_at = self._now()
        if attempt.is_remote:
            self._planner.first_token(attempt.key)
            self.transfers.tell(Move(*held.id, attempt.epoch, attempt.prefill, attempt.decode))
        else:
            attempt.holds = held.id
        if attempt.sampled is not None:
            self.transfers.tell(attempt.sampled)
        self._metrics.handoff_retargets.labels("moved" if attempt.is_remote else "local").inc()
        self._find_workers(attempt)

    def _admit(self, attempt: Attempt) -> None:
        self._attempts[attempt.id] = attempt
        self._passages[attempt.number] = attempt.passage
        attempt.passage.attempt_id = attempt.id

    def _remove(self, attempt: Attempt) -> None:
        del self._attempts[attempt.id], self._passages[attempt.number]

    def _let_go(self, attempt: Attempt, reason: str) -> None:
        """Of the pins under a local attempt: it has blocks of its own by now, or is over."""
        assert attempt.holds is not None, "it holds nothing"
        self.transfers.tell(Abandon(*attempt.holds, reason))
        attempt.holds = None

    def _find_workers(self, attempt: Attempt) -> None:
        stage = attempt.stage
        stage.decode = self._find_worker(attempt, attempt.decode)
        stage.prefill = self._find_worker(attempt, attempt.prefill) if attempt.is_remote else stage.decode

    def _find_worker(self, attempt: Attempt, incarnation: str) -> str:
        """Its id; or its incarnation, if it has gone since the plan was made."""
        worker = self._fleet.get(incarnation)
        if worker is not None:
            return worker.id
        attempt.worker_lost(incarnation, "it went before the request reached it")
        self.transfers.tell(Gone(incarnation))  # again: the first time, this handoff was not open
        return incarnation

    def close_attempt(self, attempt: Attempt, finished: bool, reason: str) -> None:
        self._remove(attempt)
        attempt.stage.ended_at = self._now()
        attempt.stage.reason = "" if finished else reason
        self._planner.ended(attempt.key, finished=finished)
        if not finished:
            for incarnation in {attempt.prefill, attempt.decode}:
                self.tell(incarnation, Cancel(attempt.key, attempt.epoch))
        if attempt.is_pushed:
            self.transfers.tell(Abandon(attempt.key, attempt.epoch, "finished" if finished else reason))
        if attempt.holds is not None:
            self._let_go(attempt, reason)

    def prompt_seen(self, num_tokens: int, cached_tokens: int) -> None:
        metrics = self._metrics
        self._computed_tokens.value += num_tokens - cached_tokens
        self._cached_tokens.value += cached_tokens
        metrics.vllm_prompt_tokens.value += num_tokens
        metrics.vllm_cache_queries.value += num_tokens
        metrics.vllm_cache_hits.value += cached_tokens


def _note_prefill(stage: StageTimes, worker: Worker, arrival: Arrival, ended_at: float) -> None:
    """When the prompt was computed; from when on, as well as this host's clock can tell."""
    step_s = 0.0 if arrival.timing is None else arrival.timing.duration_s
    admitted_at = arrival.delta.admitted_at if worker.is_here else None
    stage.admitted_at = ended_at - step_s if admitted_at is None else admitted_at
    stage.computed_at = ended_at
