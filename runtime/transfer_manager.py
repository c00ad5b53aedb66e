"""The transfer manager: the actor that owns the intent of every handoff and relays between its two ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from dynrt.runtime.actor import Actor
from dynrt.runtime.errors import MailboxFullError
from dynrt.runtime.messages import ToEngine
from dynrt.transfer.events import FirstToken, FromDecodeEnd, FromPrefillEnd
from dynrt.transfer.ledger import HandoffLedger
from dynrt.transfer.ledger_effects import Closed, Decided, Kill, LedgerEffect, Send


class Open(msgspec.Struct, frozen=True):
    """Start to keep account of a handoff whose two ends are being told."""

    key: bytes
    epoch: int
    prefill: str
    decode: str


class Computed(msgspec.Struct, frozen=True):
    """All of the prompt is computed: the token that prefill sampled behind it was seen."""

    key: bytes
    epoch: int
    has_choice: bool  # of decode workers, should this one have no room


class Move(msgspec.Struct, frozen=True):
    """Hand the finished prompt, for which decode had no room, to another decode worker."""

    key: bytes
    epoch: int
    new_epoch: int
    prefill: str
    decode: str


class Abandon(msgspec.Struct, frozen=True):
    """Nobody wants it any more; unknown or ended handoffs are left as they are."""

    key: bytes
    epoch: int
    reason: str


class Said(msgspec.Struct, frozen=True):
    """A worker's message about a handoff."""

    incarnation: str
    message: FromPrefillEnd | FromDecodeEnd


class Gone(msgspec.Struct, frozen=True):
    """That incarnation's process has ended."""

    incarnation: str


class Tick(msgspec.Struct, frozen=True):
    """A deadline may have come."""


TransferMessage = Open | Computed | Move | FirstToken | Abandon | Said | Gone | Tick


class TransferManager(Actor[TransferMessage]):
    """The ledger's clock and voice."""

    def __init__(
        self,
        ledger: HandoffLedger,
        tell: Callable[[str, ToEngine], None],
        kill: Callable[[tuple[str, ...], str], None],
        on_decided: Callable[[Decided], None],
    ) -> None:
        super().__init__("transfer manager")
        self._ledger = ledger
        self._tell = tell
        self._kill = kill
        self._on_decided = on_decided
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open_handoffs(self) -> int:
        return self._ledger.num_open

    @property
    def oldest_handoff_s(self) -> float:
        """Age of the handoff that has been open for longest; 0 without any."""
        return self._ledger.oldest_s(asyncio.get_running_loop().time())

    @property
    def quarantined_blocks(self) -> int:
        return self._ledger.quarantined_blocks

    async def receive(self, message: TransferMessage) -> None:
        now = asyncio.get_running_loop().time()
        self._act(self._effects(message, now))
        self._set_timer()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _effects(self, message: TransferMessage, now: float) -> list[LedgerEffect]:
        match message:
            case Open():
                self._ledger.open((message.key, message.epoch), message.prefill, message.decode, now)
                return []
            case Computed():
                return self._ledger.computed((message.key, message.epoch), message.has_choice, now)
            case Move(key, epoch, new_epoch, prefill, decode):
                return self._ledger.retarget((key, epoch), (key, new_epoch), prefill, decode, now)
            case FirstToken():
                return self._ledger.first_token(message)
            case Abandon():
                return self._ledger.cancel((message.key, message.epoch), message.reason, now)
            case Said(incarnation, said):
                return self._ledger.on_message(incarnation, said, now)
            case Gone(incarnation):
                return self._ledger.worker_lost(incarnation, now)
            case Tick():
                return self._ledger.on_time(now)

    def _act(self, effects: list[LedgerEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._send(to, message)
                case Kill(suspects, reason):
                    self._kill(suspects, reason)
                case Decided():
                    self._on_decided(effect)
                case Closed():
                    pass  # the ledger has forgotten it; nobody else remembers

    def _send(self, to: str, message: ToEngine) -> None:
        try:
            self._tell(to, message)
        except MailboxFullError as error:
            self._kill((to,), str(error))  # a full outbox is a hang

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._ledger.next_deadline()
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self.tell, Tick())
