"""A whole simulated engine process on an event loop in virtual time: speaks the real messages, sleeps for nobody.

A request's tokens come in two deltas, the first token and the rest: what lies between tells nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from dynrt.engines.config import EngineConfig
from dynrt.engines.orders import (
    Drop,
    Generate,
    News,
    Order,
    Orders,
    Reserve,
    SnapshotWanted,
    StatusSeen,
    StepDone,
)
from dynrt.engines.protocol import EngineRequest, Token
from dynrt.engines.sim.handoffs import HOST, Handoffs, Peers
from dynrt.engines.sim.skipping import TOKEN_ID, SkippingCore, Stretch
from dynrt.engines.sim.timed import TimedStep
from dynrt.runtime.messages import (
    PROTOCOL_VERSION,
    Cancel,
    FromEngine,
    Refused,
    Register,
    Shutdown,
    SnapshotRequest,
    Status,
    StatusRequest,
    StepReport,
    Submit,
    ToEngine,
    TokenDelta,
    Unknown,
    Welcome,
)
from dynrt.transfer.events import CancelHandoff, FirstToken, HandoffId


@dataclass
class _Reply:
    """A request whose tokens the client waits for."""

    num_left: int  # tokens that were not sent
    wants_first: bool
    is_prefill: bool  # no more than that first one


class SimWorker:
    """Runs from its construction. `send` carries its messages to the runtime, `on_exit` is called at its end."""

    def __init__(
        self,
        core: SkippingCore,
        config: EngineConfig,
        incarnation: str,
        peers: Peers,
        send: Callable[[FromEngine], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._core = core
        self._config = config
        self.incarnation = incarnation
        self._send = send
        self._on_exit = on_exit
        self._handoffs = Handoffs(incarnation, core.profile, core.info.geometry[0], peers, send, self._post)
        self._orders = Orders(core, self._handoffs, self._publish)
        self._inbox: deque[Order] = deque()
        self._running: TimedStep | Stretch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._will_turn = False
        self._replies: dict[HandoffId, _Reply] = {}
        self._reserved: dict[HandoffId, Submit] = {}  # their first token is still to come
        self.prefill_tokens_by_minute: Counter[int] = Counter()
        self.busy_s = 0.0

    @property
    def role(self) -> str:
        return self._config.role

    @property
    def num_open(self) -> int:
        """Requests, handoffs and orders that are not over, and requests that hold blocks."""
        load = self._core.load()
        requests = load.waiting_requests + load.running_requests + load.blocks_active
        return (
            requests + len(self._replies) + len(self._reserved) + len(self._inbox) + self._handoffs.num_open
        )

    def register(self, spawn_token: str, pid: int) -> None:
        """Tell the runtime of this engine."""
        info = self._core.info
        self._send(
            Register(
                protocol_version=PROTOCOL_VERSION,
                incarnation=self.incarnation,
                spawn_token=spawn_token,
                role=self._config.role,
                engine_kind=info.kind,
                model=self._config.model_name,
                context_length=info.context_length,
                vocab_size=info.vocab_size,
                geometry=info.geometry,
                agent_metadata=[b""],
                region_addresses=[[0] * info.geometry[0].num_layers],
                first_token_from=info.first_token_from,
                takes_grammar=info.takes_grammar,
                pid=pid,
                host=HOST,
                version="0",
            )
        )

    # --- control ----------------------------------------------------------------------------------

    def on_message(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(key, epoch):
                self._drop((key, epoch))
            case CancelHandoff():
                self._drop(message.id)
                self._handoffs.post(message)
            case FirstToken():
                self._first_token(message)
            case StatusRequest():
                self._post(message)
            case Shutdown():
                self._on_exit()
            case Welcome():
                pass  # it has no heart to beat
            case SnapshotRequest():
                self._post(SnapshotWanted())
            case Refused() | Unknown():
                raise AssertionError(
                    f"nothing goes wrong between a replay's runtime and its engines: {message}"
                )
            case _:
                self._handoffs.post(message)

    def _submit(self, submit: Submit) -> None:
        request = EngineRequest.of(submit)
        if submit.purpose == "reserve":
            self._reserved[submit.key, submit.epoch] = submit
            self._post(Reserve(request, submit.peer, submit.lease_s))
            return
        num_tokens = submit.sampling.max_tokens - len(request.output_ids)
        is_prefill = submit.purpose == "prefill"
        wants_first = is_prefill or not request.output_ids
        self._replies[submit.key, submit.epoch] = _Reply(num_tokens, wants_first, is_prefill)
        self._post(Generate(request))

    def _first_token(self, first: FirstToken) -> None:
        submit = self._reserved.pop(first.id, None)
        if submit is None:
            return  # cancelled meanwhile
        num_before = len(submit.output_ids) // 4 + 1
        num_left = submit.sampling.max_tokens - num_before
        self._replies[first.id] = _Reply(num_left, wants_first=False, is_prefill=False)
        self._handoffs.post(first)

    def _drop(self, handoff: HandoffId) -> None:
        self._replies.pop(handoff, None)
        self._reserved.pop(handoff, None)
        self._post(Drop(*handoff))

    # --- compute ----------------------------------------------------------------------------------

    def _post(self, order: Order) -> None:
        """To be carried out when the step that runs now has ended."""
        self._inbox.append(order)
        if isinstance(self._running, Stretch):
            self._running.cut(self._now())
            self._wait_for(self._running)
        elif self._running is None and not self._will_turn:
            self._will_turn = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._will_turn = True
        self._carry_out_orders()
        self._will_turn = False
        if self._core.has_work():
            self._begin()
        else:
            self._orders.report_load()

    def _carry_out_orders(self) -> None:
        """Those too that come of others."""
        self._orders.reserve_pending()
        while self._inbox:
            self._orders.handle(self._inbox.popleft())
            if not self._inbox:
                self._orders.reserve_pending()

    def _begin(self) -> None:
        now = self._now()
        stretch = self._core.plan_stretch(now)
        if stretch is not None:
            self._wait_for(stretch)
            return
        step = self._core.plan_step(now)
        self._wait_for(step)
        if step.ready:
            self._handoffs.step_begins(step)

    def _wait_for(self, step: TimedStep | Stretch) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._running = step
        self._timer = asyncio.get_running_loop().call_at(step.ends_at, self._finish)

    def _finish(self) -> None:
        step, self._running, self._timer = self._running, None, None
        assert step is not None
        if isinstance(step, Stretch):
            output = self._core.finish_stretch(step)
        else:
            output = self._core.finish_step(step, step.ends_at)
            self._count(step)
        self.busy_s += step.ends_at - step.started_at
        self._orders.report(output)
        self._turn()

    def _count(self, step: TimedStep) -> None:
        self.prefill_tokens_by_minute[int(step.started_at // 60)] += step.work.prefill_tokens

    # --- news -------------------------------------------------------------------------------------

    def _publish(self, news: News) -> None:
        match news:
            case StepDone(output, cache):
                deltas = [delta for token in output.tokens if (delta := self._delta(token)) is not None]
                self._send(StepReport(deltas, output.load, output.timing, cache))
            case StatusSeen(token, load):
                self._send(Status(token, load, self._handoffs.num_open, len(self._replies), 0, 0, 0))
            case _:
                self._send(news)

    def _delta(self, token: Token) -> TokenDelta | None:
        """None: nobody waits for it, or it comes with the last one."""
        handoff = token.key, token.epoch
        reply = self._replies.get(handoff)
        is_over = token.finish_reason is not None
        if reply is None or not (reply.wants_first or is_over):
            return None
        count = 1 if reply.wants_first else reply.num_left
        reply.num_left -= count
        reply.wants_first = False
        if is_over or reply.is_prefill:
            del self._replies[handoff]
        if token.error is not None:
            return TokenDelta(*handoff, [], "", "error", error=token.error, is_refusal=token.is_refusal)
        return TokenDelta(
            *handoff,
            [TOKEN_ID] * count,
            "",
            token.finish_reason,
            None,
            token.cached_tokens,
            admitted_at=token.admitted_at,
        )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
