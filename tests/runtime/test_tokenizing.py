"""What of a request is tokenized at once, and what off the event loop."""

from __future__ import annotations

from typing import Any

import pytest

from dynrt.runtime.tokenizing import SMALL_CHARS, is_small

LONG = "x" * (SMALL_CHARS + 1)
HALF = "x" * (SMALL_CHARS // 2)


def chat(content: Any) -> list[Any]:
    return [[{"role": "user", "content": content}], None, {}]


@pytest.mark.parametrize("value", ["", "x" * SMALL_CHARS, chat("hi"), chat([{"text": HALF}]), [None, 7, {}]])
def test_what_holds_little_is_small(value: Any) -> None:
    assert is_small(value)


@pytest.mark.parametrize(
    "value",
    [
        LONG,
        chat(LONG),
        chat([{"text": HALF}, {"text": HALF}]),
        {LONG: 1},
        [[]] * 2000,
        dict.fromkeys(map(str, range(600))),
    ],
    ids=["text", "message", "parts", "key", "items", "keys"],
)
def test_what_holds_much_is_not(value: Any) -> None:
    assert not is_small(value)
