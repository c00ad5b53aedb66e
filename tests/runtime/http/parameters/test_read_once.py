"""Bodies that differ in their prompts alone are read once; what might read otherwise is read again."""

from __future__ import annotations

from typing import Any

import pytest

from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.read_once import MAX_KEY_BYTES, MAX_KNOWN, ReadOnce


class Reading:
    """Reads `n`, and counts how often it does."""

    def __init__(self) -> None:
        self.times = 0
        self.once = ReadOnce(self._read, but=("prompt",))

    def _read(self, fields: Fields) -> int:
        self.times += 1
        return fields.integer("n", 1, 1, 9)

    def read(self, **values: Any) -> tuple[int, bool]:
        """The value, and whether it was found to be in order."""
        fields = Fields(values, Problems())
        return self.once(fields), fields.problems.none


def test_other_prompts_are_no_other_bodies() -> None:
    reading = Reading()
    assert [reading.read(n=3, prompt=prompt) for prompt in ("a", ["b"], None)] == [(3, True)] * 3
    assert reading.times == 1


@pytest.mark.parametrize(("known", "other"), [(1, True), (1, 1.0), (1, "1"), (1, None), (1, [1])])
def test_values_that_are_equal_in_python_alone_are_not_the_same(known: Any, other: Any) -> None:
    reading = Reading()
    assert reading.read(n=known) == (1, True)
    assert reading.read(n=other) == (1, other is None)
    assert reading.times == 2


def test_problems_are_found_each_time() -> None:
    reading = Reading()
    assert [reading.read(n=10), reading.read(n=10)] == [(1, False)] * 2


def test_what_is_kept_is_bounded() -> None:
    reading = Reading()
    for _ in range(2):
        reading.read(x="x" * MAX_KEY_BYTES)
    assert reading.times == 2
    for x in range(MAX_KNOWN + 1):
        reading.read(x=x)
    reading.read(x=MAX_KNOWN)
    reading.read(x=0)
    assert reading.times == MAX_KNOWN + 4


def test_what_is_nested_too_deeply_to_be_compared_is_read() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    reading = Reading()
    assert reading.read(n=2, x=deep) == (2, True)
    while deep:  # else freeing it nests as deeply
        deep = deep.pop()
