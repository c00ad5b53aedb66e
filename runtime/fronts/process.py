"""One front process: the endpoint on a shared port, in front of a runtime in another process."""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import zmq

from dynrt.engines.address import connect_dealer
from dynrt.runtime.errors import MailboxFullError
from dynrt.runtime.fronts.backend import RemoteBackend
from dynrt.runtime.fronts.messages import (
    BEAT_S,
    Beat,
    Drain,
    FromFront,
    FrontSettings,
    Hello,
    Listening,
    Reload,
    State,
    ToFront,
    decode_to_front,
    encode,
)
from dynrt.runtime.http.server import HttpServer
from dynrt.runtime.logs import set_up_logs
from dynrt.runtime.loop import loop_factory
from dynrt.runtime.offload import ThreadOffload
from dynrt.runtime.open_files import allow_many
from dynrt.runtime.prompts import PromptEncoder

READ_BATCH = 256  # messages read before the loop may do something else


def run_front() -> int:
    """Until the runtime says to drain; the lifeline ends it with the runtime. Settings come on standard input."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontSettings)
    set_up_logs()
    allow_many()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # they may go to every process here; the runtime says what to do
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_Front(settings).run())
    return 0


class _Front:
    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings

    async def run(self) -> None:
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._has_state = asyncio.Event()
        self._drain: asyncio.Future[Drain] = self._loop.create_future()
        offload = ThreadOffload()
        prompts = await offload.run(lambda: PromptEncoder.from_dir(settings.model_path))
        self._backend = RemoteBackend(prompts, offload, self._send)
        self._server = HttpServer(self._backend, settings.options)
        context = zmq.Context()
        self._socket = connect_dealer(context, settings.address, settings.name)
        descriptor = int(self._socket.getsockopt(zmq.FD))
        try:
            self._loop.add_reader(descriptor, self._read)
            self._send(Hello())
            await self._has_state.wait()  # if it never comes, the runtime ends this process
            await self._server.start(settings.host, settings.port, shared=True)
            self._send(Listening())
            await self._server.stop((await self._beat_until_drain()).limit_s)
        finally:
            self._loop.remove_reader(descriptor)
            context.destroy(linger=0)
            offload.close()

    async def _beat_until_drain(self) -> Drain:
        while not self._drain.done():
            self._send(Beat())
            await asyncio.wait([self._drain], timeout=BEAT_S)
        return self._drain.result()

    def _send(self, message: FromFront) -> None:
        """Raises MailboxFullError: the runtime hangs."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise MailboxFullError("the runtime does not take this front's messages") from None
        self._loop.call_soon(self._read)  # the descriptor is edge-triggered, and a send may consume its edge

    def _read(self) -> None:
        for _ in range(READ_BATCH):
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(decode_to_front(payload))
        self._loop.call_soon(self._read)

    def _on_message(self, message: ToFront) -> None:
        match message:
            case Drain():
                if not self._drain.done():
                    self._drain.set_result(message)
            case Reload():
                self._server.reload()
            case State():
                self._backend.on_message(message)
                self._has_state.set()
                if message.is_ending:
                    self._server.announce_end()
            case _:
                self._backend.on_message(message)
