"""The transfer manager: the ledger's clock and voice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from zmq_engine import eventually

from dynrt.runtime.errors import MailboxFullError
from dynrt.runtime.messages import ToEngine
from dynrt.runtime.transfer_manager import Abandon, Gone, Open, Said, TransferManager
from dynrt.runtime.virtual_time import run_virtually
from dynrt.transfer.events import Arm, CancelHandoff, Committed, Drained, FirstToken, Quiesced, Reserved, Sent
from dynrt.transfer.ledger import HandoffLedger, LedgerLimits
from dynrt.transfer.ledger_effects import Decided

KEY = bytes(16)
LIMITS = LedgerLimits(reserve_answer_s=0.02, settle_s=0.02, lease_s=30.0)


class Setting:
    """A running manager and what it says and wants."""

    def __init__(self, limits: LedgerLimits) -> None:
        self.told: list[tuple[str, ToEngine]] = []
        self.killed: list[str] = []
        self.decided: list[Decided] = []
        self.full: set[str] = set()
        self.manager = TransferManager(
            HandoffLedger(limits),
            self.tell,
            lambda suspects, reason: self.killed.append(suspects[0]),
            self.decided.append,
        )
        self.task = asyncio.create_task(self.manager.run())

    def tell(self, incarnation: str, message: ToEngine) -> None:
        if incarnation in self.full:
            raise MailboxFullError(f"{incarnation} takes nothing")
        self.told.append((incarnation, message))

    async def close(self) -> None:
        self.manager.stop()
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def patient() -> AsyncIterator[Setting]:
    setting = Setting(LedgerLimits())
    yield setting
    await setting.close()


@pytest.fixture
async def hasty() -> AsyncIterator[Setting]:
    setting = Setting(LIMITS)
    yield setting
    await setting.close()


async def test_handoff_from_open_to_committed(patient: Setting) -> None:
    manager = patient.manager
    manager.tell(Open(KEY, 0, "p", "d"))
    manager.tell(Said("d", Reserved(KEY, 0, 0, [4, 5], 20)))
    manager.tell(FirstToken(KEY, 0, 7, 1))
    manager.tell(Said("p", Sent(KEY, 0, 100, 1, 0.0, 0.0)))
    manager.tell(Said("d", Committed(KEY, 0, 5.0, "host")))
    await eventually(lambda: manager.open_handoffs == 0 and bool(patient.decided), "it is over")
    assert patient.told == [("p", Arm(KEY, 0, "d", 0, [4, 5], 20)), ("d", FirstToken(KEY, 0, 7, 1))]
    assert [decided.outcome for decided in patient.decided] == ["committed"]


async def test_abandoned_handoff_ends_at_both_ends(patient: Setting) -> None:
    manager = patient.manager
    manager.tell(Open(KEY, 0, "p", "d"))
    manager.tell(Abandon(KEY, 0, "the client left"))
    manager.tell(Abandon(KEY, 7, "unknown"))
    manager.tell(Said("p", Quiesced(KEY, 0, "")))
    manager.tell(Said("d", Drained(KEY, 0, "")))
    await eventually(lambda: bool(patient.decided) and manager.open_handoffs == 0, "it is over")
    cancelled = [to for to, message in patient.told if isinstance(message, CancelHandoff)]
    assert cancelled == ["p", "d"]


async def test_silent_ends_are_killed_and_their_death_closes_the_handoff(hasty: Setting) -> None:
    """No answer to the reservation, none to the cancel: prefill first, then decode."""
    hasty.manager.tell(Open(KEY, 0, "p", "d"))
    await eventually(lambda: hasty.killed == ["p"], "prefill is killed")
    hasty.manager.tell(Gone("p"))
    await eventually(lambda: hasty.killed == ["p", "d"], "decode is killed")
    hasty.manager.tell(Gone("d"))
    await eventually(lambda: hasty.manager.open_handoffs == 0, "it is over")
    assert [decided.outcome for decided in hasty.decided] == ["failed"]


async def test_end_with_a_full_outbox_is_killed(patient: Setting) -> None:
    patient.full.add("p")
    patient.manager.tell(Open(KEY, 0, "p", "d"))
    patient.manager.tell(Said("d", Reserved(KEY, 0, 0, [4], 10)))
    await eventually(lambda: patient.killed == ["p"], "it hangs")


def test_stopped_manager_sets_no_timer_off() -> None:
    async def main() -> None:
        setting = Setting(LIMITS)
        setting.manager.tell(Open(KEY, 0, "p", "d"))
        await eventually(lambda: setting.manager.open_handoffs == 1, "it is open")
        await setting.close()
        await asyncio.sleep(2 * LIMITS.reserve_answer_s)
        assert setting.manager.mailbox_size == 0

    run_virtually(main())
