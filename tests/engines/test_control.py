"""The control thread: registers until answered, relays in order, and drops everything when its runtime is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from thread_fakes import DEADLINE_S, KEY, FakeReplies, FakeRuntime, FakeTransfer, Heard, step_output, submit

from dynrt.engines import address, control
from dynrt.engines.control import ControlThread
from dynrt.engines.orders import Drop, Generate, Reserve, SnapshotWanted, StatusSeen, StepDone
from dynrt.engines.protocol import Token
from dynrt.runtime.errors import ConfigError, RegistrationError
from dynrt.runtime.messages import (
    PROTOCOL_VERSION,
    Cancel,
    EngineLoad,
    Goodbye,
    Refused,
    Register,
    Shutdown,
    SnapshotRequest,
    Status,
    StatusRequest,
    StepReport,
    Unknown,
    Welcome,
)
from dynrt.transfer.events import Arm, CancelHandoff, Committed, FirstToken, Quiesced, Retarget

ME = "e" * 16
WELCOME = Welcome("runtime", "decode-0", 0.5)
REGISTER = Register(
    PROTOCOL_VERSION, ME, "", "both", "fake", "tiny", 32, 256, [], [], [], "prefill", False, 1, "here", "0"
)


class Rig:
    """A control thread among fakes, and the runtime that it speaks to."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.relayed = Heard()  # to compute and transfer, in the order of their arrival
        self.transfer = FakeTransfer()
        self.transfer.post = self.relayed
        self.replies = FakeReplies()
        self.welcomes, self.ends = Heard(), Heard()
        self.thread = ControlThread(
            runtime.address, REGISTER, self.replies, self.relayed, self.transfer, self.welcomes, self.ends
        )

    def tell(self, *messages: object) -> None:
        for message in messages:
            self.runtime.tell(ME, message)

    def settle(self) -> None:
        """Until all that was told before has been relayed."""
        self.tell(StatusRequest(7))
        self.relayed.next(StatusRequest)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[FakeRuntime]:
    runtime = FakeRuntime(tmp_path)
    yield runtime
    runtime.close()


@pytest.fixture
def rig(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(control, "REGISTER_AGAIN_S", 0.05)
    rig = Rig(runtime)
    rig.thread.start()
    yield rig
    rig.thread.stop(DEADLINE_S)
    assert not rig.thread._thread.is_alive()


@pytest.fixture
def welcome(rig: Rig) -> Rig:
    """The rig, registered."""
    assert rig.runtime.next(Register) == (ME, REGISTER)
    rig.tell(WELCOME)
    rig.welcomes.next(Welcome)
    return rig


def test_registers_until_it_is_answered(rig: Rig) -> None:
    for _ in range(3):
        assert rig.runtime.next(Register) == (ME, REGISTER)
    rig.tell(WELCOME, WELCOME)
    rig.settle()
    assert rig.welcomes.log == [WELCOME], "an answer to each of its letters is one welcome"


def test_refused(rig: Rig) -> None:
    rig.runtime.next(Register)
    rig.tell(Refused("engine serves model 'a', this runtime 'b'"))
    assert str(rig.ends.next(RegistrationError)) == "engine serves model 'a', this runtime 'b'"


def test_told_to_end(welcome: Rig) -> None:
    welcome.tell(Shutdown())
    assert welcome.ends.next(type(None)) is None


@pytest.mark.parametrize("purpose", ["generate", "prefill"])
def test_a_request_goes_to_compute(welcome: Rig, purpose: str) -> None:
    welcome.tell(submit(purpose))
    request = welcome.relayed.next(Generate).request
    assert (request.prompt_ids, request.prefill_only) == ([5, 6, 7], purpose == "prefill")
    assert len(welcome.replies) == 1


def test_a_stop_string_ends_the_request_in_the_engine(welcome: Rig) -> None:
    welcome.tell(submit())
    welcome.relayed.next(Generate)
    welcome.thread.publish(StepDone(step_output([Token(KEY, 0, 9)]), None))
    assert welcome.relayed.next(Drop) == Drop(KEY, 0)
    assert welcome.runtime.next(StepReport)[1].deltas[0].finish_reason == "stop"


def test_a_reservation_is_decoded_behind_its_first_token(welcome: Rig) -> None:
    welcome.tell(submit("reserve", peer="p"), FirstToken(KEY, 0, 42, 3))
    assert welcome.relayed.next(Reserve).peer == "p"
    assert welcome.relayed.next(FirstToken).token_id == 42
    assert welcome.replies.opened == [([42], 3)]


def test_a_first_token_of_a_cancelled_reservation_is_dropped(welcome: Rig) -> None:
    welcome.tell(submit("reserve"), CancelHandoff(KEY, 0, "client left"), FirstToken(KEY, 0, 42, 3))
    welcome.settle()
    assert [type(one) for one in welcome.relayed.log] == [Reserve, Drop, CancelHandoff, StatusRequest]
    assert len(welcome.replies) == 0


def test_a_reservation_whose_engine_samples_is_decoded_from_its_commit_on(welcome: Rig) -> None:
    welcome.tell(submit("reserve"), submit("reserve", epoch=1), CancelHandoff(KEY, 1, "client left"))
    welcome.settle()
    for epoch in (0, 1):
        welcome.thread.publish(Committed(KEY, epoch, 1.0, "here"))
        welcome.runtime.next(Committed)
    assert welcome.replies.opened == [([], 0)]


def test_compute_drops_before_transfer_releases(welcome: Rig) -> None:
    welcome.tell(submit("prefill"), CancelHandoff(KEY, 0, "client left"))
    welcome.settle()
    kinds = [type(one) for one in welcome.relayed.log]
    assert kinds.index(Drop) < kinds.index(CancelHandoff)


def test_messages_of_the_handoff_go_to_transfer(welcome: Rig) -> None:
    arm = Arm(KEY, 0, "peer", 0, [1], 4)
    welcome.tell(arm, SnapshotRequest())
    assert welcome.relayed.next(Arm) == arm
    welcome.relayed.next(SnapshotWanted)


def test_a_finished_prompt_that_moves_is_dropped_under_its_new_epoch(welcome: Rig) -> None:
    welcome.tell(submit("prefill"), Retarget(KEY, 0, 4), Unknown())
    welcome.runtime.next(Register)
    assert welcome.relayed.next(Retarget) == Retarget(KEY, 0, 4)
    assert welcome.relayed.next(CancelHandoff).epoch == 4


def test_status_counts_everything(welcome: Rig) -> None:
    welcome.tell(submit())
    welcome.relayed.next(Generate)
    welcome.thread.publish(StatusSeen(7, EngineLoad(), 2))
    _, status = welcome.runtime.next(Status)
    assert (status.token, status.requests, status.open_handoffs) == (7, 1 + 2, FakeTransfer.open_handoffs)
    assert status.open_fds > 0 and status.threads > 1 and status.rss_bytes > 1 << 20


def open_requests(rig: Rig) -> None:
    """One that decodes here, one to hand off, one reserved, and three that are over."""
    rig.tell(
        submit(epoch=0),
        submit("prefill", epoch=1),
        submit("reserve", epoch=2),
        submit(epoch=3),
        Cancel(KEY, 3),
        submit("prefill", epoch=4),
        submit("reserve", epoch=5),
    )
    rig.settle()
    rig.thread.publish(Quiesced(KEY, 4, "client left"))
    rig.thread.publish(Committed(KEY, 5, 1.0, "here"))
    rig.runtime.next(Committed)
    rig.relayed.log.clear()


def assert_dropped(rig: Rig) -> None:
    """Nobody waits for what was asked: dropped in compute, and every open handoff cancelled."""
    dropped = {one.epoch for one in rig.relayed.log if isinstance(one, Drop)}
    cancelled = {one.epoch for one in rig.relayed.log if isinstance(one, CancelHandoff)}
    assert (dropped, cancelled) == ({0, 1, 2, 5}, {1, 2})
    assert len(rig.replies) == 0


def test_unknown_to_the_runtime_it_drops_all_and_registers_again(welcome: Rig) -> None:
    open_requests(welcome)
    welcome.tell(Unknown(), Unknown())
    assert welcome.runtime.next(Register) == (ME, REGISTER)
    welcome.tell(WELCOME)
    welcome.settle()
    assert_dropped(welcome)
    assert len(welcome.welcomes.log) == 2


def test_a_runtime_away_for_a_whole_outbox_is_forgotten(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "OUTBOX_LIMIT", 10)
    monkeypatch.setattr(control, "REGISTER_AGAIN_S", 0.05)
    rig = Rig(runtime)
    rig.thread.start()
    runtime.next(Register)
    rig.tell(WELCOME)
    rig.welcomes.next(Welcome)
    open_requests(rig)
    runtime.shut()
    for _ in range(5000):  # more than the sockets of both ends and the system between them hold
        rig.thread.publish(StepDone(step_output(), None))
    for _ in range(4):
        rig.relayed.next(Drop)
    for _ in range(2):
        rig.relayed.next(CancelHandoff)
    assert_dropped(rig)
    runtime.open()
    runtime.next(Register)
    rig.thread.stop(DEADLINE_S)


def test_what_was_said_before_the_end_is_sent(welcome: Rig) -> None:
    welcome.thread.publish(StepDone(step_output(), None))
    welcome.thread.stop(DEADLINE_S)
    welcome.runtime.next(StepReport)
    assert welcome.runtime.next(Goodbye)[1] == Goodbye(ME)


def test_an_address_that_is_none_ends_the_process() -> None:
    ends = Heard()
    thread = ControlThread(
        "nowhere", REGISTER, FakeReplies(), Heard(), FakeTransfer(), Heard(), ends
    )  # fmt: skip
    thread.start()
    assert "'nowhere' is no address" in str(ends.next(ConfigError))
