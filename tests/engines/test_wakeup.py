"""The wakeup queue: readable while it may hold something, in order, and complete under many writers."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from dynrt.engines.wakeup import WakeupQueue


@pytest.fixture
def items() -> Iterator[WakeupQueue[int]]:
    items: WakeupQueue[int] = WakeupQueue()
    yield items
    items.close()


def is_readable(items: WakeupQueue[int]) -> bool:
    return bool(select.select([items], [], [], 0)[0])


def test_readable_until_taken(items: WakeupQueue[int]) -> None:
    assert not is_readable(items) and list(items.take_all()) == []
    for number in range(3):
        items.put(number)
    assert is_readable(items) and len(items) == 3
    assert list(items.take_all()) == [0, 1, 2]
    assert not is_readable(items) and len(items) == 0


def test_what_is_put_while_taking_is_not_forgotten(items: WakeupQueue[int]) -> None:
    items.put(0)
    taken = []
    for number in items.take_all():
        taken.append(number)
        if number == 0:
            items.put(1)
    while is_readable(items):
        taken += items.take_all()
    assert taken == [0, 1]


def test_many_writers_lose_nothing(items: WakeupQueue[int]) -> None:
    per_writer, writers = 2000, 4
    threads = [
        threading.Thread(target=lambda base=base: [items.put(base + number) for number in range(per_writer)])
        for base in range(0, writers * per_writer, per_writer)
    ]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < writers * per_writer:
        assert select.select([items], [], [], 10.0)[0], "items are there, and nobody was woken"
        taken += items.take_all()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(writers * per_writer))
    for base in range(0, writers * per_writer, per_writer):
        of_one = [number for number in taken if base <= number < base + per_writer]
        assert of_one == sorted(of_one), "each writer's items keep their order"
