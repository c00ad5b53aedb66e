"""A simulated world around the three handoff cores: virtual time, random order, deaths, hangs and late bytes.

What it models of NIXL, as measured: writes land in any order; a write is seen DONE and its notification is read only
after it landed; a dead sender's bytes can land at the receiver's next two polls; so can those of a failed write.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

from dynrt.transfer import notifications
from dynrt.transfer.decode_end import DecodeEnd
from dynrt.transfer.effects import Notify, Order, Tell
from dynrt.transfer.ends import HandoffEnds
from dynrt.transfer.events import CancelHandoff, FirstToken, HandoffId, ReserveRefused
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.ledger import HandoffLedger, LedgerLimits
from dynrt.transfer.ledger_effects import Closed, Decided, Kill, Send
from dynrt.transfer.local import BlocksReady, CommitBlocks, PrefillOpened, ReleaseBlocks, ReservationMade
from dynrt.transfer.mapping import Slice
from dynrt.transfer.prefill_end import PrefillEnd
from dynrt.transfer.write import Write

DECODE_BLOCKS = 12
LEASE_S = 30.0
VALUE_BYTES = 2
LATE_POLLS = 2  # polls of the receiver within which a broken connection's bytes land


@dataclass
class Prompt:
    """One request: what prefill computes, what decode has of it already."""

    id: HandoffId
    prefill: str
    decode: str
    num_tokens: int
    num_blocks: int  # as prefill counts them
    prefill_hit: int  # its blocks
    decode_hit: int  # decode's blocks
    computed: int = 0  # blocks, in the current life of the sequence
    is_dropped: bool = False
    moved_from: Prompt | None = None  # the same prompt, for which its decode worker had no room

    @property
    def source_id(self) -> HandoffId:
        """What the prefill engine calls it."""
        return self.id if self.moved_from is None else self.moved_from.source_id


@dataclass
class Flying:
    """A posted write."""

    write: Write
    sender: str
    posted_at: float
    landed: bool = False
    is_stuck: bool = False  # neither lands nor ends, for as long as both workers live
    late_polls: int | None = None  # set once the connection broke: lands within so many polls, or never

    @property
    def source_blocks(self) -> set[int]:
        return _blocks(self.write.source_pieces, self.write.route.source)

    @property
    def target_blocks(self) -> set[int]:
        return _blocks(self.write.target_pieces, self.write.route.target)


@dataclass
class Worker:
    name: str
    geometry: list[KvGeometry]
    prefill: PrefillEnd
    decode: DecodeEnd
    alive: bool = True
    hung: bool = False
    inbox: deque[Any] = field(default_factory=deque)  # from the runtime
    outbox: deque[Any] = field(default_factory=deque)  # to the runtime
    reserves: deque[Prompt] = field(
        default_factory=deque
    )  # Submits with purpose "reserve", in the compute thread
    queued: deque[Prompt] = field(default_factory=deque)  # Submits with purpose "prefill", not yet looked at
    prompts: deque[Prompt] = field(default_factory=deque)  # being computed
    steps: deque[int] = field(default_factory=deque)  # layers that the current step still writes
    step_blocks: list[tuple[Prompt, int, int]] = field(
        default_factory=list
    )  # (prompt, prompt block, block id)
    finishing: list[Prompt] = field(default_factory=list)  # prompts whose last block is in the current step
    memory: dict[tuple[int, int, int], Any] = field(
        default_factory=dict
    )  # (rank, layer, value's index) → content
    pinned: dict[HandoffId, list[int]] = field(default_factory=lambda: defaultdict(list))
    reserved: dict[HandoffId, tuple[Prompt, list[int]]] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(DECODE_BLOCKS)))
    next_block: int = 1000

    @property
    def ends(self) -> HandoffEnds:
        return HandoffEnds(self.prefill, self.decode)


class World:
    def __init__(
        self,
        seed: int,
        *,
        cancels: bool = True,
        deaths: bool = False,
        hangs: bool = False,
        failures: bool = False,
        stalls: bool = False,
        is_scarce: bool = False,
    ) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.num_layers = self.rng.randint(1, 4)
        self.num_heads = self.rng.choice((1, 2))
        self.order = self.rng.choice(("block,kv,token,head,dim", "block,kv,head,token,dim"))
        prefill_shape, decode_shape = self._make_geometry(), self._make_geometry()
        self.cancels, self.deaths, self.hangs, self.failures = cancels, deaths, hangs, failures
        self.stalls = stalls
        self.is_scarce = is_scarce  # reservations wait for room, instead of being refused
        self.workers: dict[str, Worker] = {}
        for name in ("p0", "p1"):
            self._start_worker(name, prefill_shape)
        for name in ("d0", "d1"):
            self._start_worker(name, decode_shape)
        for prefill, decode in product(("p0", "p1"), ("d0", "d1")):
            self.workers[prefill].prefill.introduce(decode, decode_shape)
            self.workers[decode].decode.introduce(prefill, prefill_shape)
        self.ledger = HandoffLedger(LedgerLimits(lease_s=LEASE_S, room_s=0.1 if is_scarce else 60.0))
        self.held: list[Prompt] = []  # finished, and without room on decode
        self.flying: list[Flying] = []
        self.notified: list[tuple[str, bytes]] = []  # on their way: receiver, notification
        self.units_posted: dict[tuple[Any, ...], int] = defaultdict(int)
        self.lost_unnoticed: list[str] = []
        self.prompts: dict[HandoffId, Prompt] = {}
        self.outcomes: dict[HandoffId, str] = {}
        self.committed: set[HandoffId] = set()
        self.closed: set[HandoffId] = set()
        self.refused: set[HandoffId] = set()
        self.num_landed_late = 0
        self.speed = self.rng.choice((0.05, 0.2, 1.0))  # of the network: writes that land in a turn
        self.promptness = self.rng.choice((0.02, 0.3, 1.0))  # of compute threads that are asked for something

    def _make_geometry(self) -> list[KvGeometry]:
        """Of blocks of 1, 2 or 4 tokens; with more ranks than heads, some hold the same."""
        block_size, num_ranks = self.rng.choice((1, 2, 4)), self.rng.choice((1, 1, 2, 3))
        firsts = [rank * self.num_heads // num_ranks for rank in range(num_ranks)]
        count = max(1, self.num_heads // num_ranks)
        return [
            KvGeometry(
                self.num_layers, 1 << 20, block_size, count, 1, "float16", self.order, first, self.num_heads
            )
            for first in firsts
        ]

    def _start_worker(self, name: str, geometry: list[KvGeometry]) -> None:
        decode = DecodeEnd(geometry, "host", takes_first_token=self.rng.random() < 0.7)
        self.workers[name] = Worker(name, geometry, PrefillEnd(geometry), decode)

    # --- the run ----------------------------------------------------------------------------------

    def run(self, num_prompts: int, num_turns: int) -> None:
        for _ in range(num_turns):
            if len(self.prompts) < num_prompts and self.rng.random() < 0.1:
                self._submit()
            self._turn(calm=False)
        self._settle(3000)
        for worker in self.workers.values():
            if worker.hung:
                self._die(worker)  # by the heartbeat limit: a prompt may compute for as long as it likes
        self._settle(1000)
        for _ in range(300):  # what came late must change nothing
            self._turn(calm=True)
        self.check_end()

    def _settle(self, num_turns: int) -> None:
        """No more faults, until nothing is open."""
        self.speed = self.promptness = 1.0
        while self.ledger.num_open and num_turns:
            num_turns -= 1
            self._turn(calm=True)

    def _turn(self, *, calm: bool) -> None:
        self.now += self.rng.choice((0.0, 0.0002, 0.005)) + (0.02 if calm else 0.0)
        self._effects(self.ledger.on_time(self.now))
        actions = [
            self._land,
            self._see_done,
            self._deliver_notification,
            self._poll,
            self._post,
            self._compute,
        ]
        actions += [
            self._to_worker,
            self._to_runtime,
            self._reserve,
            self._take_elsewhere,
            self._post,
            self._compute,
            self._notice_loss,
        ]
        if not calm:
            actions += [self._fault]
        self.rng.shuffle(actions)
        for action in actions:
            if calm or self.rng.random() < 0.6:
                action()

    def _submit(self) -> None:
        num_tokens = self.rng.randint(1, 8)
        block_size = self.workers["p0"].geometry[0].block_size
        most_held = num_tokens // self.workers["d0"].geometry[0].block_size
        prompt = Prompt(
            id=(bytes([len(self.prompts)]) * 16, self.rng.randint(0, 3)),
            prefill=self.rng.choice(("p0", "p1")),
            decode=self.rng.choice(("d0", "d1")),
            num_tokens=num_tokens,
            num_blocks=-(-num_tokens // block_size),
            prefill_hit=self.rng.randint(0, (num_tokens - 1) // block_size),
            decode_hit=self.rng.choice((0, 0, self.rng.randint(0, most_held))),
        )
        if not (self.workers[prompt.prefill].alive and self.workers[prompt.decode].alive):
            return
        self.prompts[prompt.id] = prompt
        self.ledger.open(prompt.id, prompt.prefill, prompt.decode, self.now)
        self.workers[prompt.prefill].inbox.append(prompt)
        self.workers[prompt.decode].inbox.append(prompt)

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive and not worker.hung]

    def _pick(self) -> Worker | None:
        running = self._running()
        return self.rng.choice(running) if running else None

    # --- messages ---------------------------------------------------------------------------------

    def _to_worker(self) -> None:
        for worker in self._running():
            if worker.inbox and self.rng.random() < 0.7:
                self._on_message(worker, worker.inbox.popleft())

    def _on_message(self, worker: Worker, message: Any) -> None:
        match message:
            case Prompt():
                is_prefill = worker.name == message.prefill
                (worker.queued if is_prefill else worker.reserves).append(message)
            case _:
                if isinstance(message, CancelHandoff) and self.rng.random() < 0.5:
                    self.prompts[message.id].is_dropped = True
                self._do(worker, worker.ends.on_event(message, self.now))

    def _to_runtime(self) -> None:
        for worker in self.workers.values():
            if worker.outbox and self.rng.random() < 0.7:
                said = worker.outbox.popleft()
                if isinstance(said, FirstToken):
                    self._effects(self.ledger.computed(said.id, True, self.now))
                    self._effects(self.ledger.first_token(said))
                else:
                    self._effects(self.ledger.on_message(worker.name, said, self.now))

    def _effects(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    if self.workers[to].alive:
                        self.workers[to].inbox.append(message)
                case Kill(suspects):
                    guilty = [one for one in suspects if self._is_guilty(one)]
                    assert guilty, f"{suspects} were condemned, but none of them hangs"
                    self._die(self.workers[guilty[0]])
                case Decided(handoff_id, outcome, cause=cause):
                    assert handoff_id not in self.outcomes
                    if cause == "no_room":
                        self.held.append(self.prompts[handoff_id])
                    self.outcomes[handoff_id] = outcome
                    assert outcome != "committed" or handoff_id in self.committed
                case Closed(handoff_id):
                    assert handoff_id not in self.closed and handoff_id in self.outcomes
                    self.closed.add(handoff_id)

    def _do(self, worker: Worker, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Tell(message):
                    worker.outbox.append(message)
                case Notify(peer, notification):
                    self.notified.append((peer, notification))
                case Order(ReleaseBlocks(key, epoch)):
                    self._release(worker, (key, epoch))
                case Order(CommitBlocks(key, epoch)):
                    self._commit(worker, (key, epoch))

    # --- memory -----------------------------------------------------------------------------------

    def _release(self, worker: Worker, handoff_id: HandoffId) -> None:
        worker.pinned.pop(handoff_id, None)
        _prompt, block_ids = worker.reserved.pop(handoff_id, (None, []))
        self._check_nothing_flies(worker, block_ids)
        worker.free += block_ids

    def _check_nothing_flies(self, worker: Worker, block_ids: list[int]) -> None:
        for flying in self.flying:
            is_here = flying.write.peer == worker.name and not flying.landed
            assert not (is_here and flying.target_blocks & set(block_ids)), "freed, but a write is on its way"

    def _commit(self, worker: Worker, handoff_id: HandoffId) -> None:
        prompt, block_ids = worker.reserved.pop(handoff_id)
        self._check_nothing_flies(worker, block_ids)
        for layer in range(self.num_layers):
            for index, block_id in enumerate(block_ids, prompt.decode_hit):
                for where, expected in self._block_values(worker, prompt, layer, index, block_id):
                    assert worker.memory[where] == expected
        assert handoff_id not in self.committed
        self.committed.add(handoff_id)
        worker.free += block_ids

    # --- the compute threads ----------------------------------------------------------------------

    def _reserve(self) -> None:
        for worker in self._running():
            if not worker.reserves or self.rng.random() > self.promptness:
                continue
            prompt = worker.reserves[0]
            num_needed = -(-prompt.num_tokens // worker.geometry[0].block_size) - prompt.decode_hit
            if self.is_scarce and num_needed > len(worker.free):
                continue
            worker.reserves.popleft()
            if num_needed > len(worker.free):
                self.refused.add(prompt.id)
                worker.outbox.append(ReserveRefused(*prompt.id, "no room"))
                continue
            block_ids = [worker.free.pop(0) for _ in range(num_needed)]
            worker.reserved[prompt.id] = (prompt, block_ids)
            lease_s = self.rng.choice((LEASE_S, 0.2)) if self.cancels else LEASE_S
            event = ReservationMade(
                *prompt.id, prompt.prefill, prompt.decode_hit, block_ids, lease_s, prompt.num_tokens
            )
            self._do(worker, worker.decode.reserved(event, self.now))

    def _take_elsewhere(self) -> None:
        """What the runtime does with a finished prompt: another decode worker, prefill itself, or too late."""
        if not self.held or self.rng.random() > self.promptness:
            return
        held = self.held.pop()
        dice = self.rng.random()
        if dice < 0.7:
            self._move(held)
        elif dice < 0.9:
            self._effects(self.ledger.cancel(held.id, "prefill decodes on", self.now))

    def _move(self, held: Prompt) -> None:
        new_id = held.id[0], held.id[1] + 10
        decode = "d1" if held.decode == "d0" else "d0"
        hit = self.rng.choice((0, held.num_tokens // self.workers[decode].geometry[0].block_size))
        moved = Prompt(
            new_id, held.prefill, decode, held.num_tokens, held.num_blocks, 0, hit, moved_from=held
        )
        self.prompts[new_id] = moved
        if self.workers[decode].alive:
            self.workers[decode].inbox.append(moved)
        self._effects(self.ledger.retarget(held.id, new_id, held.prefill, decode, self.now))
        self._effects(self.ledger.first_token(FirstToken(*new_id, token_id=7, chars_emitted=1)))
        for name in {held.prefill, decode} - set(self.lost_unnoticed):
            if not self.workers[name].alive:
                self._effects(self.ledger.worker_lost(name, self.now))

    def _compute(self) -> None:
        for worker in self._running():
            if worker.queued and self.rng.random() < self.promptness:
                prompt = worker.queued.popleft()
                self._do(worker, worker.prefill.opened(PrefillOpened(*prompt.id)))
                worker.prompts.append(prompt)
            if worker.steps:
                self._write_layer(worker)
            elif worker.prompts:
                self._begin_step(worker)

    def _begin_step(self, worker: Worker) -> None:
        ready: list[BlocksReady] = []
        for prompt in list(worker.prompts)[: self.rng.randint(1, 2)]:
            if prompt.is_dropped:
                worker.prompts.remove(prompt)
                continue
            if prompt.computed and self.rng.random() < 0.1:
                prompt.computed = 0  # preempted: its blocks are computed, and announced, again
            ready += self._chunk(worker, prompt)
        if ready:
            self._do(worker, worker.prefill.step_begins(ready, self.now))
            worker.steps.extend(range(self.num_layers))

    def _chunk(self, worker: Worker, prompt: Prompt) -> list[BlocksReady]:
        hit = prompt.prefill_hit if prompt.computed == 0 else 0
        start = prompt.computed + hit
        end = self.rng.randint(start + 1, prompt.num_blocks)
        ready = [self._ready(worker, prompt, 0, hit, written=True)] if hit else []
        ready.append(self._ready(worker, prompt, start, end, written=False))
        prompt.computed = end
        if end == prompt.num_blocks:
            worker.prompts.remove(prompt)
            worker.finishing.append(prompt)
        return ready

    def _ready(self, worker: Worker, prompt: Prompt, start: int, end: int, *, written: bool) -> BlocksReady:
        block_ids = list(range(worker.next_block, worker.next_block + end - start))
        worker.next_block += end - start
        worker.pinned[prompt.id] += block_ids
        for index, block_id in zip(range(start, end), block_ids, strict=True):
            if written:
                for layer in range(self.num_layers):
                    self._write_block(worker, prompt, layer, index, block_id)
            else:
                worker.step_blocks.append((prompt, index, block_id))
        return BlocksReady(*prompt.id, start, block_ids, written, prompt.num_tokens)

    def _write_block(self, worker: Worker, prompt: Prompt, layer: int, index: int, block_id: int) -> None:
        worker.memory.update(self._block_values(worker, prompt, layer, index, block_id))

    def _block_values(
        self, worker: Worker, prompt: Prompt, layer: int, index: int, block_id: int
    ) -> Iterator[tuple[tuple[int, int, int], Any]]:
        """What stands where in a prompt's block `index`: (rank, layer, value's index), content."""
        size = worker.geometry[0].block_size
        positions = range(index * size, min(prompt.num_tokens, (index + 1) * size))
        for rank, geometry in enumerate(worker.geometry):
            count = geometry.num_kv_heads
            for kv, position, head in product(range(2), positions, geometry.heads()):
                content = prompt.source_id, layer, kv, position, head
                inner = position % size, head - geometry.first_head
                if self.order == "block,kv,token,head,dim":
                    offset = (kv * size + inner[0]) * count + inner[1]
                else:
                    offset = (kv * count + inner[1]) * size + inner[0]
                yield (
                    (rank, layer, block_id * 2 * size * count + offset),
                    content,
                )

    def _write_layer(self, worker: Worker) -> None:
        layer = worker.steps.popleft()
        for prompt, index, block_id in worker.step_blocks:
            self._write_block(worker, prompt, layer, index, block_id)
        self._do(worker, worker.prefill.layer_written(layer, self.now))
        if not worker.steps:
            worker.step_blocks.clear()
            for prompt in worker.finishing:
                worker.outbox.append(FirstToken(*prompt.id, token_id=7, chars_emitted=1))
            worker.finishing.clear()

    # --- NIXL -------------------------------------------------------------------------------------

    def _post(self) -> None:
        worker = self._pick()
        write = worker.prefill.next_write(self.now) if worker else None
        if worker is None or write is None:
            return
        units = write.units
        for layer in units.layers():
            for piece in units.pieces():
                self.units_posted[write.id, units.route, layer, piece] += 1
                assert self.units_posted[write.id, units.route, layer, piece] == 1, "a unit was pushed twice"
        worker.prefill.write_posted(write, 0.001)
        self.flying.append(Flying(write, worker.name, self.now))

    def _land(self) -> None:
        candidates = [f for f in self.flying if not f.landed and f.late_polls is None and not f.is_stuck]
        if candidates and self.rng.random() < self.speed:
            self._copy(self.rng.choice(candidates))

    def _copy(self, flying: Flying) -> None:
        flying.landed = True
        write, units, receiver = flying.write, flying.write.units, self.workers[flying.write.peer]
        if not receiver.alive:
            return
        reserved = receiver.reserved.get(write.id)
        assert reserved is not None and flying.target_blocks <= set(reserved[1]), (
            "a write into foreign blocks"
        )
        sender = self.workers[flying.sender]
        assert (
            not sender.alive
            or flying.late_polls is not None
            or flying.source_blocks <= set(sender.pinned[self.prompts[write.id].source_id])
        ), "read from unpinned blocks"
        for layer in units.layers():
            for source, target in _values(write):
                content = sender.memory.get((write.source_rank, layer, source))
                receiver.memory[write.route.target.rank, layer, target] = content
        self.notified.append((receiver.name, notifications.encode_written(*write.id, units)))

    def _see_done(self) -> None:
        for flying in list(self.flying):
            sender = self.workers[flying.sender]
            if not flying.landed or self.rng.random() < 0.3 or sender.hung:
                continue
            self.flying.remove(flying)
            if sender.alive and flying.late_polls is None:
                self._do(sender, sender.prefill.write_done(flying.write, flying.posted_at, self.now))

    def _deliver_notification(self) -> None:
        for _ in range(min(3, len(self.notified))):
            index = self.rng.randrange(len(self.notified))
            if not self.workers[self.notified[index][0]].hung:
                self._notify(*self.notified.pop(index))

    def _notify(self, receiver: str, packed: bytes) -> None:
        worker = self.workers[receiver]
        for _ in range(self.rng.choice((1, 1, 2))):  # sometimes twice
            if worker.alive:
                self._do(worker, worker.decode.notified(notifications.decode(packed), self.now))

    def _poll(self) -> None:
        for worker in self._running():
            self._land_late(worker)
            self._do(worker, worker.decode.polled(self.now))
            self._do(worker, worker.prefill.polled(self.now))

    def _land_late(self, receiver: Worker) -> None:
        late = [f for f in self.flying if f.write.peer == receiver.name and f.late_polls is not None]
        for flying in late:
            if flying.landed:
                continue
            assert flying.late_polls is not None
            flying.late_polls -= 1
            if flying.late_polls == 0 or self.rng.random() < 0.5:
                self.num_landed_late += 1
                self._copy(flying)

    # --- faults -----------------------------------------------------------------------------------

    def _fault(self) -> None:
        dice = self.rng.random()
        worker = self._pick()
        if dice < 0.03 and self.cancels and self.prompts:
            handoff_id = self.rng.choice(list(self.prompts))
            self._effects(self.ledger.cancel(handoff_id, "the client went away", self.now))
        elif dice < 0.04 and self.deaths and worker is not None:
            self._die(worker)
        elif dice < 0.05 and self.hangs and worker is not None:
            worker.hung = True
        elif dice < 0.08 and self.failures:
            self._fail_write()
        elif dice < 0.09 and self.stalls:
            self._stick_write()

    def _stick_write(self) -> None:
        candidates = [f for f in self.flying if not f.landed and f.late_polls is None]
        if candidates:
            self.rng.choice(candidates).is_stuck = True

    def _is_guilty(self, name: str) -> bool:
        """It hangs, it is dead already, or a write of its does not end."""
        is_stuck = any(flying.sender == name and flying.is_stuck for flying in self.flying)
        return is_stuck or self.workers[name].hung or not self.workers[name].alive

    def _fail_write(self) -> None:
        candidates = [f for f in self.flying if not f.landed and f.late_polls is None]
        candidates = [f for f in candidates if self.workers[f.sender] in self._running()]
        if candidates:
            flying = self.rng.choice(candidates)
            self._break(flying)
            sender = self.workers[flying.sender]
            self._do(sender, sender.prefill.write_failed(flying.write, "connection reset"))

    def _break(self, flying: Flying) -> None:
        if self.rng.random() < 0.3:
            self.flying.remove(flying)  # nothing of it had left the sender
        else:
            flying.late_polls = LATE_POLLS

    def _die(self, worker: Worker) -> None:
        if not worker.alive:
            return
        worker.alive, worker.hung = False, False
        worker.inbox.clear()
        while worker.outbox and self.rng.random() < 0.3:
            worker.outbox.pop()
        self.notified = [n for n in self.notified if n[0] != worker.name]
        for flying in list(self.flying):
            if flying.sender == worker.name and not flying.landed and flying.late_polls is None:
                self._break(flying)
            elif flying.write.peer == worker.name and not flying.landed:
                self.flying.remove(flying)  # never lands; its sender learns by the fence
        self.lost_unnoticed.append(worker.name)

    def _notice_loss(self) -> None:
        for name in list(self.lost_unnoticed):
            if not self.workers[name].outbox:  # what it said before is read first
                self.lost_unnoticed.remove(name)
                self._effects(self.ledger.worker_lost(name, self.now))

    # --- the end ----------------------------------------------------------------------------------

    def was_undisturbed(self) -> bool:
        return all(o == "committed" or i in self.refused for i, o in self.outcomes.items())

    def check_end(self) -> None:
        assert self.ledger.num_open == 0
        is_disturbed = (
            self.is_scarce or self.cancels or self.deaths or self.hangs or self.failures or self.stalls
        )
        assert is_disturbed or self.was_undisturbed()
        assert self.closed == set(self.outcomes) == set(self.prompts)
        assert self.committed >= {i for i, outcome in self.outcomes.items() if outcome == "committed"}
        for worker in self.workers.values():
            if worker.alive:
                assert worker.prefill.num_open == worker.decode.num_open == 0
                assert not any(worker.pinned.values())
                assert sorted(worker.free) == list(range(DECODE_BLOCKS))


def _blocks(piece_ids: Sequence[int], cells: Slice) -> set[int]:
    return {piece_id // cells.pieces_per_block for piece_id in piece_ids}


def _values(write: Write) -> Iterator[tuple[int, int]]:
    """The values of one layer that `write` copies: their index at the source, and at the target."""
    route = write.route
    for source_piece, target_piece in zip(write.source_pieces, write.target_pieces, strict=True):
        for begins in zip(route.source.cells(source_piece), route.target.cells(target_piece), strict=True):
            for offset in range(0, route.source.cell_bytes, VALUE_BYTES):
                source, target = begins
                yield (source + offset) // VALUE_BYTES, (target + offset) // VALUE_BYTES
