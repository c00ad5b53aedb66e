"""An asyncio event loop on virtual time: when nothing is ready, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

HORIZON_S = 3 * 3600.0  # a simulation that is not over by then never will be


class DeadlockError(Exception):
    """Nothing is ready and no timer is set: whoever waits now waits forever."""


class HorizonError(Exception):
    """The simulation ran past its horizon."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing comes from outside, so that the same program always runs in the same order."""

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        super().__init__(_JumpingSelector(self._jump))
        self._now = 0.0
        self._horizon_s = horizon_s
        self.failures: list[BaseException] = []  # of callbacks, which nobody else would hear of
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._now

    def _jump(self, wait_s: float | None) -> None:
        """To the next timer, which is due in `wait_s`; None: there is none. A callback that failed ends it all."""
        if self.failures:
            raise self.failures[0]
        if wait_s is None:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise DeadlockError(
                f"nothing is ready and no timer is set at {self._now:g} s; waiting: {waiting}"
            )
        self._now += max(0.0, wait_s)
        if self._now > self._horizon_s:
            raise HorizonError(f"not over after {self._horizon_s:g} s of virtual time")

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or RuntimeError(context["message"]))


class _JumpingSelector(selectors.BaseSelector):
    """Takes note of descriptors (the loop has one to wake itself) and never finds one ready."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        self._jump = jump
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, int(fileobj), events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def run_virtually(main: Coroutine[Any, Any, T], horizon_s: float = HORIZON_S) -> T:
    """Run `main` on a loop of its own. Raises what failed in a callback, DeadlockError and HorizonError."""
    loop = VirtualLoop(horizon_s)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main)
    if loop.failures:
        raise loop.failures[0]
    return result
