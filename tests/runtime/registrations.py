"""Registrations of engines, and a channel that only notes what is sent, for tests of the runtime's parts."""

from __future__ import annotations

from typing import Any

import msgspec

from dynrt.runtime.channel import OnMessage
from dynrt.runtime.errors import MailboxFullError
from dynrt.runtime.messages import PROTOCOL_VERSION, Register, Role, ToEngine
from dynrt.transfer.layout import KvGeometry

GEOMETRY = KvGeometry(2, 64, 16, num_kv_heads=1, head_size=4, dtype="float32")


def registration(incarnation: str, role: Role = "both", **changes: Any) -> Register:
    register = Register(
        protocol_version=PROTOCOL_VERSION,
        incarnation=incarnation,
        spawn_token="",
        role=role,
        engine_kind="none",
        model="tiny",
        context_length=512,
        vocab_size=256,
        geometry=[GEOMETRY],
        agent_metadata=[incarnation.encode()],
        region_addresses=[[1, 2]],
        first_token_from="prefill",
        takes_grammar=False,
        pid=1,
        host="here",
        version="0",
    )
    return msgspec.structs.replace(register, **changes)


class NotingChannel:
    """A Channel."""

    address = "none"

    def __init__(self) -> None:
        self.sent: list[tuple[str, ToEngine]] = []
        self.forgotten: list[str] = []
        self.full: set[str] = set()

    def open(self, on_message: OnMessage) -> None:
        raise AssertionError("nothing is received in these tests")

    def send(self, incarnation: str, message: ToEngine) -> None:
        if incarnation in self.full:
            raise MailboxFullError(f"engine {incarnation} takes nothing")
        self.sent.append((incarnation, message))

    def forget(self, incarnation: str) -> None:
        self.forgotten.append(incarnation)

    def backlog(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to close."""

    def take(self) -> list[tuple[str, ToEngine]]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent
