"""A scripted engine process: speaks the real messages, hands off by the real state machines, computes no model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from zlib import crc32

from sim_memory import (
    BLOCK_SIZE,
    GEOMETRY,
    NUM_BLOCKS,
    NUM_LAYERS,
    VOCAB_SIZE,
    SimMemory,
    block_content,
    num_blocks,
)
from sim_transfer import SimFabric, SimTransfer

from dynrt.engines.config import EngineConfig
from dynrt.planner.events import CacheSnapshot
from dynrt.runtime.host import host_id
from dynrt.runtime.memory_channel import MemoryChannel
from dynrt.runtime.messages import (
    PROTOCOL_VERSION,
    Cancel,
    EngineLoad,
    FinishReason,
    FromEngine,
    Goodbye,
    Heartbeat,
    Refused,
    Register,
    Shutdown,
    SnapshotRequest,
    Status,
    StatusRequest,
    StepReport,
    StepTiming,
    Submit,
    ToEngine,
    TokenDelta,
    Unknown,
    Welcome,
    pack_ids,
    unpack_ids,
)
from dynrt.transfer.events import (
    CancelHandoff,
    Committed,
    FirstToken,
    FromDecodeEnd,
    FromPrefillEnd,
    HandoffId,
    ReserveRefused,
)
from dynrt.transfer.local import (
    BlocksReady,
    CommitBlocks,
    PrefillOpened,
    ReleaseBlocks,
    ReservationMade,
    ToCompute,
)

CONTEXT_LENGTH = 1024
CHUNK_TOKENS = 64
REGISTER_AGAIN_S = 1.0
EXIT_NOTICE_S = (0.0, 0.002)

Harm = Literal[
    "crash", "hang", "stall", "jam"
]  # ends; does nothing any more; is stuck in a step, or in a transfer, but its heart beats


def next_token(token_ids: Sequence[int]) -> int:
    """A function of all tokens so far: a continuation that lost or doubled one shows in every token after."""
    return 16 + crc32(pack_ids(token_ids)) % (VOCAB_SIZE - 16)


def word(token_id: int) -> str:
    return f"{token_id} "


def text_so_far(output_ids: Sequence[int], is_over: bool) -> str:
    """A word is held back until the one behind it is known if its token is a multiple of 3."""
    held = 1 if not is_over and output_ids and output_ids[-1] % 3 == 0 else 0
    return "".join(map(word, output_ids[: len(output_ids) - held]))


@dataclass
class Job:
    """A request inside the engine."""

    submit: Submit
    prompt_ids: list[int]  # and what was generated before: all that has to be in the KV cache
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_found: int = 0  # prompt tokens not computed here
    new_ids: list[int] = field(default_factory=list)  # sampled here, or by this handoff's prefill end

    @property
    def id(self) -> HandoffId:
        return self.submit.key, self.submit.epoch

    @property
    def num_blocks(self) -> int:
        num_before = len(unpack_ids(self.submit.output_ids))
        return num_blocks(len(self.prompt_ids) + self.submit.sampling.max_tokens - num_before)

    @property
    def num_prompt_blocks(self) -> int:
        return num_blocks(len(self.prompt_ids))

    @property
    def output_ids(self) -> list[int]:
        return unpack_ids(self.submit.output_ids) + self.new_ids


def _job(submit: Submit) -> Job:
    return Job(submit, unpack_ids(submit.prompt_ids) + unpack_ids(submit.output_ids))


@dataclass
class _Reply:
    """What the control side knows of a request whose tokens go to the client."""

    output_ids: list[int]
    chars: int
    is_first: bool = True


class SimEngine:
    """A Process. `trace(engine, point)` is called at each point of its work, and may harm it there."""

    def __init__(
        self,
        pid: int,
        config: EngineConfig,
        spawn_token: str,
        incarnation: str,
        channel: MemoryChannel,
        fabric: SimFabric,
        trace: Callable[[SimEngine, str], None],
        load_s: float,
        takes_first_token: bool = True,
    ) -> None:
        self.pid = pid
        self.role = config.role
        self.incarnation = incarnation
        self.memory = SimMemory()
        self.host = host_id()
        self.slowness = 1.0
        self.refuses_reservations: Literal["never", "for now", "for good"] = "never"
        self._is_full = False
        self.doubles_first_token = False
        self.fails_prompts = False
        self.takes_first_token = takes_first_token  # else it samples it itself
        self._config = config
        self._spawn_token = spawn_token
        self._fabric = fabric
        self._trace = trace
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._is_dead = self._is_hung = self._is_stalled = False
        self._is_welcome = False
        self._heartbeat_interval_s = 0.0  # unknown until the first welcome
        self._connection = channel.connect(incarnation, self._on_message)
        self._transfer = SimTransfer(
            incarnation,
            self.memory,
            fabric,
            self._tell_of_handoff,
            self._on_order,
            self._is_running,
            self._point,
            takes_first_token,
        )
        self._orders: deque[Callable[[], None]] = deque()  # for compute, between its steps
        self._waiting: deque[Job] = deque()  # for blocks: prompts and reservations, first come, first served
        self._prefilling: deque[Job] = deque()
        self._decoding: dict[HandoffId, Job] = {}
        self._reserved: dict[HandoffId, Job] = {}
        self._sources: dict[
            HandoffId, list[int]
        ] = {}  # blocks of prompts that are or were computed for a handoff
        self._pins: set[HandoffId] = set()
        self._dropped: set[HandoffId] = set()
        self._replies: dict[HandoffId, _Reply] = {}
        self._awaiting_first: dict[HandoffId, Submit] = {}
        self._step_began: float | None = None
        self._reported_load = EngineLoad()
        self._later(load_s, self._register)

    # --- the process ------------------------------------------------------------------------------

    async def exited(self) -> int:
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        self._end(-9)

    def release(self) -> None:
        """Nothing to close here."""

    def harm(self, harm: Harm) -> None:
        match harm:
            case "crash":
                self._end(-11)
            case "hang":
                self._is_hung = True
                self._connection.hang()
            case "stall":
                self._is_stalled = True
                self._step_began = self._step_began or self._now()
            case "jam":
                self._transfer.jam(self._now())

    def fill(self, is_full: bool = True) -> None:
        """It has no blocks for reservations, until it is told otherwise."""
        self._is_full = is_full
        self._later(1e-5, self._turn)

    @property
    def is_alive(self) -> bool:
        return not self._is_dead

    @property
    def is_spawned(self) -> bool:
        return self._spawn_token != ""

    @property
    def is_idle(self) -> bool:
        jobs = len(self._waiting) + len(self._prefilling) + len(self._decoding) + len(self._reserved)
        held = self.memory.num_active + len(self._pins) + self._transfer.open_handoffs
        return jobs + held + len(self._replies) + len(self._orders) + len(self._awaiting_first) == 0

    def end_seen_at_once(self) -> None:
        """Killed from outside, and the runtime sees it before it does anything else."""
        self._end(-9)
        self._show_end(-9)

    def leave(self) -> None:
        """End in good order, by itself."""
        self._tell(Goodbye(self.incarnation))
        self._end(0)

    def _end(self, status: int) -> None:
        if self._is_dead:
            return
        self._is_dead = True
        self._connection.close()
        self._transfer.died()
        self._fabric.after(EXIT_NOTICE_S, lambda: self._show_end(status))

    def _show_end(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    def _is_running(self) -> bool:
        return not self._is_dead and not self._is_hung

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        def run() -> None:
            if self._is_running():
                call()

        asyncio.get_running_loop().call_later(delay_s, run)

    def _point(self, name: str) -> None:
        self._trace(self, name)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # --- control ----------------------------------------------------------------------------------

    def _tell(self, message: FromEngine) -> None:
        if self._is_running():
            self._connection.send(message)

    def _tell_of_handoff(self, message: FromPrefillEnd | FromDecodeEnd) -> None:
        self._tell(message)
        submit = self._awaiting_first.pop(message.id, None) if isinstance(message, Committed) else None
        if submit is not None:
            self._open_reply(submit)

    def _open_reply(self, submit: Submit) -> None:
        self._replies[submit.key, submit.epoch] = _Reply(unpack_ids(submit.output_ids), submit.chars_emitted)

    def _register(self) -> None:
        if self._is_welcome:
            return
        self._tell(self.registration())
        self._point("registering")
        self._later(REGISTER_AGAIN_S, self._register)

    def registration(self) -> Register:
        return Register(
            protocol_version=PROTOCOL_VERSION,
            incarnation=self.incarnation,
            spawn_token=self._spawn_token,
            role=self._config.role,
            engine_kind="scripted",
            model=self._config.model_name,
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            geometry=[GEOMETRY],
            agent_metadata=[b""],
            region_addresses=[[0] * NUM_LAYERS],
            first_token_from="prefill" if self.takes_first_token else "decode",
            takes_grammar=False,
            pid=self.pid,
            host=self.host,
            version="0",
        )

    def _beat(self) -> None:
        now = self._now()
        step_age_s = now - self._step_began if self._step_began is not None else 0.0
        self._tell(Heartbeat(self.incarnation, step_age_s, self._transfer.turn_age_s(now)))
        self._later(self._heartbeat_interval_s, self._beat)

    def _on_message(self, message: ToEngine) -> None:
        match message:
            case Welcome():
                self._welcomed(message)
            case Submit():
                self._submit(message)
            case Cancel(key, epoch):
                self._cancel((key, epoch))
            case CancelHandoff():
                self._awaiting_first.pop(message.id, None)
                self._cancel(message.id)
                self._transfer.post(message)
            case FirstToken():
                self._first_token(message)
            case StatusRequest(token):
                self._tell(self._status(token))
            case Shutdown():
                self._end(0)
            case Unknown():
                self._forget_runtime()
            case SnapshotRequest():
                self._tell(CacheSnapshot(0, []))  # it shares no prefixes
            case Refused():
                raise AssertionError(f"unexpected in these simulations: {message}")
            case _:
                self._transfer.post(message)

    def _welcomed(self, welcome: Welcome) -> None:
        is_first, self._is_welcome = self._heartbeat_interval_s == 0.0, True
        self._heartbeat_interval_s = welcome.heartbeat_interval_s
        if is_first:
            self._beat()

    def _forget_runtime(self) -> None:
        """Another one answers at its address. In these simulations the one before has ended all its requests."""
        assert self.is_idle
        self._is_welcome = False
        self._register()

    def _submit(self, submit: Submit) -> None:
        self._point(f"submitted {submit.purpose}")
        if submit.purpose == "reserve":
            self._awaiting_first[submit.key, submit.epoch] = submit
        else:
            self._open_reply(submit)
        self._order(lambda: self._enqueue(_job(submit)))

    def _first_token(self, first: FirstToken) -> None:
        submit = self._awaiting_first.pop(first.id, None)
        if submit is None:
            return
        self._replies[first.id] = _Reply(
            [*unpack_ids(submit.output_ids), first.token_id], first.chars_emitted
        )
        self._transfer.post(first)

    def _cancel(self, handoff: HandoffId) -> None:
        self._replies.pop(handoff, None)
        self._order(lambda: self._drop(handoff))

    def _status(self, token: int) -> Status:
        num_requests = len(self._replies) + len(self._waiting)
        return Status(token, self._load(), self._transfer.open_handoffs, num_requests, 0, 0, 0)

    # --- compute ----------------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._later(1e-5, self._turn)

    def _on_order(self, order: ToCompute) -> None:
        match order:
            case CommitBlocks():
                self._order(lambda: self._commit(order))
                self._point("committed")
            case ReleaseBlocks(key, epoch):
                self._order(lambda: self._release((key, epoch)))

    def _turn(self) -> None:
        if self._step_began is not None:
            return
        while self._orders:
            self._orders.popleft()()
        self._admit()
        if self._prefilling or self._decoding:
            self._begin_step()
        elif self._load() != self._reported_load:
            self._report([], None)

    def _enqueue(self, job: Job) -> None:
        if job.submit.purpose == "prefill":
            self._transfer.post(PrefillOpened(*job.id))
        if job.submit.purpose == "reserve" and self.refuses_reservations != "never":
            self._awaiting_first.pop(job.id, None)
            is_unfit = self.refuses_reservations == "for good"
            self._tell(ReserveRefused(*job.id, "told to refuse", is_unfit))
        elif job.id not in self._dropped:
            self._waiting.append(job)

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            if self._is_full and job.submit.purpose == "reserve":
                return
            blocks = self.memory.take(job.num_blocks, job.id)
            if blocks is None:
                return
            self._waiting.popleft()
            job.blocks = blocks
            if job.submit.purpose == "reserve":
                self._reserve(job)
            else:
                self._prefilling.append(job)
            if job.submit.purpose == "prefill":
                self._sources[job.id] = blocks

    def _reserve(self, job: Job) -> None:
        self._reserved[job.id] = job
        prompt_blocks = job.blocks[: job.num_prompt_blocks]
        submit = job.submit
        self._transfer.post(
            ReservationMade(*job.id, submit.peer, 0, prompt_blocks, submit.lease_s, len(job.prompt_ids))
        )

    def _commit(self, order: CommitBlocks) -> None:
        handoff = order.key, order.epoch
        if handoff in self._dropped:
            self._release(handoff)
            return
        job = self._reserved.pop(handoff)
        self.memory.check(handoff, job.blocks, job.prompt_ids)
        if order.first_token != (next_token(job.prompt_ids) if self.takes_first_token else None):
            self.memory.violations.append(f"{handoff} goes on behind {order.first_token}")
        if order.first_token is not None:
            job.new_ids.append(order.first_token)
        job.num_found = len(job.prompt_ids)
        self._decoding[handoff] = job

    def _release(self, handoff: HandoffId) -> None:
        job = self._reserved.pop(handoff, None)
        if job is not None:
            self.memory.give(job.blocks)
        self._pins.discard(handoff)
        self._give_source(handoff)

    def _drop(self, handoff: HandoffId) -> None:
        self._dropped.add(handoff)
        self._waiting = deque(job for job in self._waiting if job.id != handoff)
        for job in [job for job in self._prefilling if job.id == handoff]:
            self._prefilling.remove(job)
            if job.submit.purpose == "generate":
                self.memory.give(job.blocks)
        self._give_source(handoff)
        decoding = self._decoding.pop(handoff, None)
        if decoding is not None:
            self.memory.give(decoding.blocks)

    def _give_source(self, handoff: HandoffId) -> None:
        """Once it is neither computed nor pinned."""
        is_computed = any(job.id == handoff for job in self._prefilling)
        if not is_computed and handoff not in self._pins and handoff in self._sources:
            self.memory.give(self._sources.pop(handoff))

    # --- one step ---------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._step_began = self._now()
        chunk = self._chunk()
        ready = [blocks for job, end in chunk if (blocks := self._announcement(job, end)) is not None]
        if ready:
            self._transfer.step_begins(ready)
        num_tokens = sum(end - job.num_computed for job, end in chunk)
        step_s = self.slowness * (1e-3 + 5e-5 * num_tokens + 1e-4 * len(self._decoding))
        for layer in range(NUM_LAYERS):
            written_s = step_s * (layer + 0.5) / NUM_LAYERS
            self._later(written_s, lambda layer=layer: self._write_layer(layer, chunk, bool(ready)))
        decoding = list(self._decoding.values())
        self._later(step_s, lambda: self._end_step(chunk, decoding))
        self._point("step begins")

    def _chunk(self) -> list[tuple[Job, int]]:
        """Prompts of this step, each with the number of its tokens that will be computed then."""
        left, chunk = CHUNK_TOKENS, []
        for job in self._prefilling:
            count = min(left, len(job.prompt_ids) - job.num_computed)
            left -= count
            if count:
                chunk.append((job, job.num_computed + count))
        return chunk

    def _announcement(self, job: Job, end: int) -> BlocksReady | None:
        first, stop = _completed(job, end)
        if job.submit.purpose != "prefill" or first == stop:
            return None
        self._pins.add(job.id)
        return BlocksReady(*job.id, first, job.blocks[first:stop], False, len(job.prompt_ids))

    def _write_layer(self, layer: int, chunk: list[tuple[Job, int]], is_announced: bool) -> None:
        if self._is_stalled:
            return
        for job, end in chunk:
            for block in range(*_completed(job, end)):
                content = block_content(job.prompt_ids, block, layer)
                self.memory.write(job.id, job.blocks[block], layer, content)
        if is_announced:
            self._transfer.layer_written(layer)
        self._point("layer written")

    def _end_step(self, chunk: list[tuple[Job, int]], decoding: list[Job]) -> None:
        if self._is_stalled:
            return
        assert self._step_began is not None
        duration_s, self._step_began = self._now() - self._step_began, None
        num_tokens = sum(end - job.num_computed for job, end in chunk)
        timing = StepTiming(duration_s, self._now(), num_tokens, 0, len(decoding), 0)
        deltas = [delta for job, end in chunk if (delta := self._computed(job, end)) is not None]
        deltas += [delta for job in decoding if (delta := self._sample(job)) is not None]
        self._report(deltas, timing)
        self._point("step ended")
        self._later(1e-5, self._turn)

    def _computed(self, job: Job, end: int) -> TokenDelta | None:
        job.num_computed = end
        if end < len(job.prompt_ids):
            return None
        self._prefilling.remove(job)
        if job.submit.purpose == "prefill":
            self._give_source(job.id)
        else:
            self._decoding[job.id] = job
        return self._sample(job)

    def _sample(self, job: Job) -> TokenDelta | None:
        token_id = next_token(job.prompt_ids + job.new_ids)
        job.new_ids.append(token_id)
        finish = _finish_reason(job, token_id)
        if finish is not None and self._decoding.pop(job.id, None) is not None:
            self.memory.give(job.blocks)
        return self._delta(job, token_id, finish)

    def _delta(self, job: Job, token_id: int, finish: FinishReason | None) -> TokenDelta | None:
        reply = self._replies.get(job.id)
        if reply is None:
            return None  # cancelled meanwhile
        reply.output_ids.append(token_id)
        text = text_so_far(reply.output_ids, finish is not None)[reply.chars :]
        reply.chars += len(text)
        if finish is not None or job.submit.purpose == "prefill":
            del self._replies[job.id]
        if self.fails_prompts:
            return TokenDelta(*job.id, [], "", "error", error="told to fail")
        cached_tokens, reply.is_first = (job.num_found if reply.is_first else None), False
        token_ids = [token_id] * (1 + self.doubles_first_token)
        return TokenDelta(*job.id, token_ids, text, finish, None, cached_tokens)

    def _report(self, deltas: list[TokenDelta], timing: StepTiming | None) -> None:
        self._reported_load = self._load()
        self._tell(StepReport(deltas, self._reported_load, timing))

    def _load(self) -> EngineLoad:
        running = len(self._prefilling) + len(self._decoding)
        return EngineLoad(len(self._waiting), running, NUM_BLOCKS, self.memory.num_active)


def _completed(job: Job, end: int) -> tuple[int, int]:
    """Prompt blocks that are complete once `end` tokens are computed, and were not before; a partial last one too."""
    first = job.num_computed // BLOCK_SIZE
    return first, job.num_prompt_blocks if end == len(job.prompt_ids) else end // BLOCK_SIZE


def _finish_reason(job: Job, token_id: int) -> FinishReason | None:
    sampling = job.submit.sampling
    if token_id in sampling.stop_token_ids:
        return "stop"
    return "length" if len(job.output_ids) >= sampling.max_tokens else None
