"""The front processes of one runtime: started, watched, restarted, and drained together."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from dynrt.runtime.errors import ConfigError, MailboxFullError
from dynrt.runtime.fronts.messages import (
    BEAT_S,
    Drain,
    FromFront,
    FrontSettings,
    Hello,
    Reload,
    State,
    ToFront,
    decode_from_front,
)
from dynrt.runtime.fronts.session import FrontSession
from dynrt.runtime.fronts.spawn import spawn_front
from dynrt.runtime.restart import RestartPolicy
from dynrt.runtime.runtime import Runtime
from dynrt.runtime.spawner import Process
from dynrt.runtime.zmq_channel import ZmqRouter

log = logging.getLogger("dynrt.fronts")

MAX_FRONTS = 64
START_S = 60.0  # for a front to load the tokenizer and to listen
SILENT_S = 10.0  # without a beat: its loop hangs
STOP_GRACE_S = 5.0  # beyond the time it has for its requests


class _Front:
    """A running front process."""

    def __init__(self, process: Process, session: FrontSession) -> None:
        self.process = process
        self.session = session


class Fronts:
    """Like a task group: a front that cannot start, or ends again and again, cancels the body and is raised."""

    def __init__(
        self,
        runtime: Runtime,
        settings: FrontSettings,
        count: int,
        spawn: Callable[[FrontSettings], Process] = spawn_front,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._count = count
        self._spawn = spawn
        self._router: ZmqRouter[ToFront, FromFront] = ZmqRouter(decode_from_front)
        self._fronts: dict[str, _Front] = {}
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._drain: Drain | None = None  # once they are to end

    async def __aenter__(self) -> Self:
        """Returns once all of them listen."""
        await self._group.__aenter__()
        self._router.open(self._on_message)
        listening = [asyncio.Event() for _ in range(self._count)]
        self._tasks = [
            self._group.create_task(self._keep(number, event), name=f"front {number}")
            for number, event in enumerate(listening)
        ]
        self._tasks.append(self._group.create_task(self._watch(), name="fronts' states"))
        try:
            for event in listening:
                await event.wait()  # one that does not come to listen is killed, which cancels this
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._router.close()

    def reload(self) -> None:
        self._tell_all(Reload())

    def announce_end(self) -> None:
        """Tell load balancers while still taking requests."""
        self._is_ending = True
        self._tell_all(self._state())

    async def stop(self, drain_s: float) -> None:
        """Each takes nothing new, finishes what it serves within `drain_s`, and ends."""
        self._drain = Drain(drain_s)
        self._tell_all(self._drain)
        ends = [asyncio.ensure_future(front.process.exited()) for front in self._fronts.values()]
        if ends:
            await asyncio.wait(ends, timeout=drain_s + STOP_GRACE_S)

    async def _keep(self, number: int, listens: asyncio.Event) -> None:
        """Start the front and restart it when it ends, until cancelled; then end it."""
        policy = RestartPolicy()
        while True:
            name = f"front-{number}-{secrets.token_hex(4)}"
            status = await self._run(name, listens)
            if self._drain is not None:
                return
            log.warning("front ended", extra={"front": name, "status": status})
            if not listens.is_set():
                raise ConfigError(
                    f"front {number} ended with status {status} before it listened; it says why above"
                )
            pause_s = policy.crashed(asyncio.get_running_loop().time())
            if pause_s is None:
                raise ConfigError(f"front {number} ends again and again; it says why above")
            await asyncio.sleep(pause_s)

    async def _run(self, name: str, listens: asyncio.Event) -> int:
        """One process from its start to its end, whose status is returned."""
        session = FrontSession(self._runtime, lambda message: self._tell(name, message), listens)
        process = self._spawn(
            msgspec.structs.replace(self._settings, name=name, address=self._router.address)
        )
        self._fronts[name] = _Front(process, session)
        session.heard_at += START_S  # it has that much longer for its first word
        try:
            return await process.exited()
        finally:
            process.kill()
            del self._fronts[name]
            self._router.forget(name)
            await session.end()

    async def _watch(self) -> None:
        """Tell every front how things stand, and end those that hang; until cancelled."""
        while True:
            self._tell_all(self._state())
            await asyncio.sleep(BEAT_S)
            now = asyncio.get_running_loop().time()
            for name, front in list(self._fronts.items()):
                if front.session.heard_at + SILENT_S < now:
                    self._kill(name, f"it has been silent for {SILENT_S:g} s")

    def _state(self) -> State:
        runtime = self._runtime
        return State(runtime.models(), runtime.ready(), runtime.draining(), self._is_ending)

    def _on_message(self, name: str, message: FromFront) -> None:
        front = self._fronts.get(name)
        if front is None:
            return
        if isinstance(message, Hello):
            self._tell(name, self._state())
            if self._drain is not None:
                self._tell(name, self._drain)  # it was still starting
        front.session.on_message(message)

    def _tell_all(self, message: ToFront) -> None:
        for name in list(self._fronts):
            self._tell(name, message)

    def _tell(self, name: str, message: ToFront) -> None:
        try:
            self._router.send(name, message)
        except MailboxFullError as error:
            self._kill(name, str(error))

    def _kill(self, name: str, reason: str) -> None:
        front = self._fronts.get(name)
        if front is not None:
            log.warning("killing front", extra={"front": name, "reason": reason})
            front.process.kill()
