"""Connecting to a control address: what cannot be one is refused and leaves no socket open."""

from __future__ import annotations

import pytest
import zmq

from dynrt.engines.address import connect_dealer
from dynrt.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "'' is no address"),
        ("nowhere", "'nowhere' is no address"),
        ("udp://127.0.0.1:1", "is no address"),
        ("tcp://127.0.0.1:7000", "lacks the runtime's key; use the whole address tcp://HOST:PORT#KEY"),
        ("tcp://127.0.0.1:7000#short", "lacks the runtime's key"),
    ],
)
def test_refused(address: str, message: str) -> None:
    context = zmq.Context()
    with pytest.raises(ConfigError) as caught:
        connect_dealer(context, address, "me")
    assert message in str(caught.value)
    context.term()  # waits for ever if a socket were left open


def test_an_address_where_nobody_listens_yet_is_fine() -> None:
    with zmq.Context() as context, connect_dealer(context, "ipc:///tmp/dynrt-nobody", "me") as dealer:
        assert dealer.get(zmq.IDENTITY) == b"me"
        assert dealer.get(zmq.LINGER) == 0
