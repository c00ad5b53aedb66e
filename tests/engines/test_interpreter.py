"""Threads of an engine process share its interpreter in turns that are short beside a layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from dynrt.engines.interpreter import SWITCH_S, share_interpreter


@pytest.fixture(autouse=True)
def python_as_before() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def test_a_waiting_thread_gets_its_turn_after_a_tenth_of_a_millisecond() -> None:
    share_interpreter()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S) == pytest.approx(0.1e-3)
