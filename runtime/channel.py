"""Channel: the runtime's one control socket to all its engines, as an interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dynrt.runtime.messages import FromEngine, ToEngine

OnMessage = Callable[[str, FromEngine], None]  # (sender's incarnation, message)


class Channel(Protocol):
    """Carries messages by incarnation. Sends never block; delivery is in order per engine, or not at all."""

    @property
    def address(self) -> str:
        """Where engines connect; known after `open`."""

    def open(self, on_message: OnMessage) -> None:
        """Start to receive. `on_message` is called on the event loop."""

    def send(self, incarnation: str, message: ToEngine) -> None:
        """Raises MailboxFullError if that engine has not taken its last messages: it hangs."""

    def forget(self, incarnation: str) -> None:
        """That engine is gone: drop what waits for it."""

    def backlog(self) -> int:
        """Messages waiting for engines."""

    def close(self) -> None: ...
