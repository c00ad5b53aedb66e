"""A worker: one engine process as the runtime sees it, and the way to speak to it."""

from __future__ import annotations

import asyncio
import itertools

from dynrt.runtime.channel import Channel
from dynrt.runtime.errors import AskTimeoutError, NoWorkerError
from dynrt.runtime.host import host_id
from dynrt.runtime.messages import EngineLoad, Register, Role, Status, StatusRequest, ToEngine
from dynrt.runtime.spawner import Process


class Worker:
    """The reference to a remote actor: `tell` sends, `ask` sends and awaits the answer with a deadline."""

    def __init__(
        self, worker_id: str, register: Register, channel: Channel, process: Process | None, now: float
    ):
        self.id = worker_id
        self.incarnation = register.incarnation
        self.register = register
        self.process = process  # None: on another host
        self.is_here = register.host == host_id()  # its clock is ours
        self.heard_at = now
        self.step_age_s = 0.0
        self.transfer_age_s = 0.0
        self.load = EngineLoad()
        self._channel = channel
        self._tokens = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Status]] = {}

    @property
    def role(self) -> Role:
        return self.register.role

    @property
    def is_spawned(self) -> bool:
        """By this runtime; others joined."""
        return bool(self.register.spawn_token)

    @property
    def prefills(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        return self.role in ("decode", "both")

    def tell(self, message: ToEngine) -> None:
        """Raises MailboxFullError if the engine has stopped taking messages."""
        self._channel.send(self.incarnation, message)

    async def ask(self, timeout_s: float) -> Status:
        """The engine's Status of this moment."""
        token = next(self._tokens)
        reply: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._asked[token] = reply
        try:
            self.tell(StatusRequest(token))
            async with asyncio.timeout(timeout_s):
                await reply
            return reply.result()
        except TimeoutError:
            raise AskTimeoutError(f"worker {self.id} did not answer within {timeout_s:g} s") from None
        finally:
            del self._asked[token]

    def answered(self, status: Status) -> None:
        reply = self._asked.get(status.token)
        if reply is not None and not reply.done():
            reply.set_result(status)

    def left(self) -> None:
        """Its process has ended: nobody will answer."""
        for reply in self._asked.values():
            if not reply.done():
                reply.set_exception(NoWorkerError(f"worker {self.id} has ended"))
