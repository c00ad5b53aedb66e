"""The control thread: the engine's socket to the runtime, and the text of its requests."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from dynrt.engines.address import connect_dealer
from dynrt.engines.orders import Drop, Generate, News, Order, Reserve, SnapshotWanted, StatusSeen, StepDone
from dynrt.engines.protocol import EngineRequest
from dynrt.engines.replies import Replies
from dynrt.engines.wakeup import WakeupQueue
from dynrt.runtime.errors import RegistrationError
from dynrt.runtime.messages import (
    Cancel,
    FromEngine,
    Goodbye,
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
    decode_to_engine,
    encode,
    unpack_ids,
)
from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    Committed,
    ConnectPeer,
    Drained,
    FencePeer,
    FirstToken,
    HandoffId,
    PeerQuiesced,
    Quiesced,
    RenewLease,
    ReserveRefused,
    Retarget,
    Sent,
    ToDecodeEnd,
    ToPrefillEnd,
)

log = logging.getLogger("dynrt.engine")

REGISTER_AGAIN_S = 1.0
FAREWELL_MS = 200  # for what was said last to leave
# As plain integers: each operation on zmq's flags takes as long as a system call.
AT_ONCE = int(zmq.NOBLOCK)
READABLE = int(zmq.POLLIN)


class TransferInbox(Protocol):
    """What the control thread passes on to the transfer thread."""

    @property
    def open_handoffs(self) -> int: ...

    def post(self, event: ToPrefillEnd | ToDecodeEnd) -> None: ...


class ControlThread:
    """Reads commands, relays them to the compute and transfer threads, and sends what these publish."""

    def __init__(
        self,
        address: str,
        register: Register,
        replies: Replies,
        to_compute: Callable[[Order], None],
        transfer: TransferInbox,
        on_welcome: Callable[[Welcome], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._address = address
        self._register = register
        self._replies = replies
        self._to_compute = to_compute
        self._transfer = transfer
        self._on_welcome = on_welcome
        self._on_end = on_end
        self._outbox: WakeupQueue[News | FromEngine] = WakeupQueue()
        self._reserved: dict[HandoffId, Submit] = {}  # reservations whose text stream is not open yet
        self._handoffs: set[HandoffId] = set()
        self._requests: set[HandoffId] = set()
        self._runtime_id: str | None = None
        self._register_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Sends what was published so far."""
        self._stopping = True
        self._outbox.put(Goodbye(self._register.incarnation))
        self._thread.join(timeout_s)

    def publish(self, news: News | FromEngine) -> None:
        """Thread-safe; never waits."""
        self._outbox.put(news)

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._socket = connect_dealer(context, self._address, self._register.incarnation)
            self._serve()
            self._socket.close(FAREWELL_MS)
        except BaseException as error:
            self._on_end(error)
        finally:
            context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._outbox.fileno(), zmq.POLLIN)
        while not self._stopping:
            self._register_if_due()
            ready = dict(poller.poll(int(1000 * REGISTER_AGAIN_S)))
            if self._socket in ready:
                self._read()
            self._write()

    def _register_if_due(self) -> None:
        if self._runtime_id is None and time.monotonic() >= self._register_at:
            self._register_at = time.monotonic() + REGISTER_AGAIN_S
            self._send(self._register)

    def _read(self) -> None:
        while int(self._socket.getsockopt(zmq.EVENTS)) & READABLE:
            self._on_message(decode_to_engine(self._socket.recv(AT_ONCE)))

    def _write(self) -> None:
        for news in self._outbox.take_all():
            self._send(self._to_message(news))

    def _send(self, message: FromEngine) -> None:
        try:
            self._socket.send(encode(message), AT_ONCE)
        except zmq.Again:
            self._forget_runtime()  # it has been away for a whole outbox of messages

    # --- from the runtime -------------------------------------------------------------------------

    def _on_message(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(key, epoch):
                self._cancel(key, epoch)
            case FirstToken():
                self._first_token(message)
            case CancelHandoff():
                self._cancel_handoff(message)
            case Retarget():
                self._retarget(message)
            case Arm() | FencePeer() | ConnectPeer() | RenewLease() | PeerQuiesced():
                self._transfer.post(message)
            case StatusRequest():
                self._to_compute(message)
            case SnapshotRequest():
                self._to_compute(SnapshotWanted())
            case Welcome() | Unknown() | Refused() | Shutdown():
                self._life(message)

    def _life(self, message: Welcome | Unknown | Refused | Shutdown) -> None:
        match message:
            case Welcome(runtime_id):
                self._welcomed(message, runtime_id)
            case Unknown():
                self._forget_runtime()
            case Refused(reason):
                self._on_end(RegistrationError(reason))
            case Shutdown():
                self._on_end(None)

    def _welcomed(self, message: Welcome, runtime_id: str) -> None:
        if self._runtime_id is None:
            self._on_welcome(message)
        self._runtime_id = runtime_id

    def _forget_runtime(self) -> None:
        """The runtime is gone, or another one answers at its address: nobody waits for what it asked."""
        if self._runtime_id is None:
            return
        log.info("the runtime is gone, registering again", extra={"incarnation": self._register.incarnation})
        for key, epoch in self._requests:
            self._to_compute(Drop(key, epoch))
        for key, epoch in self._handoffs:
            self._transfer.post(CancelHandoff(key, epoch, "the runtime is gone"))
        self._replies.close_all()
        self._reserved.clear()
        self._requests.clear()
        self._runtime_id = None
        self._register_at = 0.0

    def _submit(self, submit: Submit) -> None:
        handoff = submit.key, submit.epoch
        request = EngineRequest.of(submit)
        self._requests.add(handoff)
        if submit.purpose != "generate" and self._register.kv_connector == "layerwise":
            self._handoffs.add(handoff)
        if submit.purpose == "reserve":
            self._reserved[handoff] = submit
            self._to_compute(Reserve(request, submit.peer, submit.lease_s))
        else:
            self._to_compute(Generate(request))
            # Meanwhile: its tokens come back through this thread, so they find the text open.
            self._replies.open(submit, request.output_ids, submit.chars_emitted)

    def _first_token(self, first: FirstToken) -> None:
        submit = self._reserved.pop(first.id, None)
        if submit is None:
            return  # cancelled meanwhile
        output_ids = [*unpack_ids(submit.output_ids), first.token_id]
        self._replies.open(submit, output_ids, first.chars_emitted)
        self._transfer.post(first)

    def _retarget(self, message: Retarget) -> None:
        for known in (self._handoffs, self._requests):
            if message.id in known:
                known.remove(message.id)
                known.add(message.new_id)
        self._transfer.post(message)

    def _cancel(self, key: bytes, epoch: int) -> None:
        self._replies.close(key, epoch)
        self._requests.discard((key, epoch))
        self._to_compute(Drop(key, epoch))

    def _cancel_handoff(self, message: CancelHandoff) -> None:
        # Compute hears it first: what it drops must be dropped before the transfer thread has it released.
        self._reserved.pop(message.id, None)
        self._cancel(*message.id)
        self._transfer.post(message)

    # --- to the runtime ---------------------------------------------------------------------------

    def _to_message(self, news: News | FromEngine) -> FromEngine:
        match news:
            case StepDone(output, cache):
                deltas, texts = self._replies.tell(output.tokens)
                self._note_finished(deltas)
                return StepReport(deltas, output.load, output.timing, cache, texts)
            case StatusSeen():
                return self._status(news)
            case Sent() | Quiesced() | Drained() | ReserveRefused():
                self._handoffs.discard(news.id)
                self._requests.discard(news.id)
                self._reserved.pop(news.id, None)
            case Committed():
                self._handoffs.discard(news.id)
                self._committed(news.id)
            case _:
                pass
        return news

    def _committed(self, handoff: HandoffId) -> None:
        """Its stream is open, unless this engine samples the first token itself: that comes after this news."""
        submit = self._reserved.pop(handoff, None)
        if submit is not None:
            self._replies.open(submit, unpack_ids(submit.output_ids), submit.chars_emitted)

    def _note_finished(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None or delta.kv_transfer_params:
                self._requests.discard((delta.key, delta.epoch))
                # The engine does not know where text ends: a stop string is news to it.
                self._to_compute(Drop(delta.key, delta.epoch))

    def _status(self, seen: StatusSeen) -> Status:
        return Status(
            token=seen.token,
            load=seen.load,
            open_handoffs=self._transfer.open_handoffs,
            requests=len(self._replies) + seen.pending_reservations,
            open_fds=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            rss_bytes=_rss_bytes(),
        )


def _rss_bytes() -> int:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGESIZE")
