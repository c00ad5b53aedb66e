"""The heartbeat thread: tells the runtime that this process runs, computing nothing itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from dynrt.engines.address import connect_dealer
from dynrt.runtime.messages import HEARTBEAT_SUFFIX, Heartbeat, encode


class StepClock:
    """How long the compute thread has been inside its present step."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._began = None

    def age_s(self) -> float:
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class HeartbeatThread:
    """Sends over a socket of its own, so that neither compute nor text can delay it."""

    def __init__(
        self,
        address: str,
        incarnation: str,
        clock: StepClock,
        transfer_age_s: Callable[[], float],
        on_failure: Callable[[BaseException], None],
    ):
        self._address = address
        self._incarnation = incarnation
        self._clock = clock
        self._transfer_age_s = transfer_age_s
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, interval_s: float) -> None:
        """Or go on at another interval: each runtime that this engine registers with has its own."""
        self._interval_s = interval_s
        if self._thread.ident is None:
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._beat()
        except BaseException as error:
            self._on_failure(error)

    def _beat(self) -> None:
        identity = self._incarnation + HEARTBEAT_SUFFIX
        with zmq.Context() as context, connect_dealer(context, self._address, identity) as socket:
            while not self._stopping.wait(self._interval_s):
                beat = Heartbeat(self._incarnation, self._clock.age_s(), self._transfer_age_s())
                # The runtime may be away: a beat that it never sees tells it what it must know.
                with suppress(zmq.Again):
                    socket.send(encode(beat), zmq.NOBLOCK)
