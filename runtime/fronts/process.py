"""One front process: the endpoint on a shared port, in front of a runtime in another process."""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec

from dynrt.runtime.fronts.backend import RemoteBackend
from dynrt.runtime.fronts.link import Link
from dynrt.runtime.fronts.messages import (
    BEAT_S,
    Beat,
    Drain,
    FrontSettings,
    Hello,
    Listening,
    Reload,
    State,
    ToFront,
)
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.logs import set_up_logs
from dynrt.runtime.loop import freeze_start, loop_factory
from dynrt.runtime.offload import ThreadOffload
from dynrt.runtime.open_files import allow_many
from dynrt.runtime.prompts import PromptEncoder


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
        self._has_state = asyncio.Event()

    async def run(self) -> None:
        settings = self._settings
        self._drain: asyncio.Future[Drain] = asyncio.get_running_loop().create_future()
        offload = ThreadOffload()
        prompts = await offload.run(lambda: PromptEncoder.from_dir(settings.model_path))
        self._link = Link(settings.address, settings.name, self._on_message)
        try:
            self._backend = RemoteBackend(prompts, offload, self._link.send)
            self._server = HttpServer(self._backend, settings.options)
            await self._serve()
        finally:
            self._link.close()
            offload.close()

    async def _serve(self) -> None:
        self._link.send(Hello())
        freeze_start()
        await self._has_state.wait()  # if it never comes, the runtime ends this process
        await self._server.start(self._settings.host, self._settings.port, shared=True)
        self._link.send(Listening())
        beats = asyncio.create_task(self._beat(), name="beats")
        try:
            await self._server.stop((await self._drain).limit_s)
        finally:
            beats.cancel()
            await asyncio.wait([beats])

    async def _beat(self) -> None:
        while True:
            self._link.send(Beat(self._server.take_counts()))
            await asyncio.sleep(BEAT_S)

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
