"""A queue between threads whose reader may also be waiting for sockets."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WakeupQueue(Generic[T]):
    """Many writers, one reader. `fileno` is readable while there may be something to take.

    Its bound is its writers': each of them has a bounded number of requests, handoffs or steps to speak of.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._items)

    def fileno(self) -> int:
        return self._eventfd

    def put(self, item: T) -> None:
        self._items.append(item)
        os.eventfd_write(self._eventfd, 1)

    def take_all(self) -> Iterator[T]:
        """Everything there is now, oldest first; never waits."""
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        os.close(self._eventfd)
