"""Tests of what an engine's command line makes of --nixl-backend and --ucx."""

from __future__ import annotations

import pytest

from dynrt.engines.config import transfer_options_of
from dynrt.runtime.errors import ConfigError


def test_nothing_given_is_ucx_as_we_set_it_up() -> None:
    options = transfer_options_of(False, [], [])
    assert options.backends == ("UCX",)
    assert options.ucx == {}


def test_backends_and_settings_are_passed_on_in_their_order() -> None:
    options = transfer_options_of(True, ["LIBFABRIC", "UCX"], ["UCX_TLS=tcp,sm", "UCX_NET_DEVICES=a=b"])
    assert options.verify
    assert options.backends == ("LIBFABRIC", "UCX")
    assert options.ucx == {"UCX_TLS": "tcp,sm", "UCX_NET_DEVICES": "a=b"}


@pytest.mark.parametrize("pair", ["UCX_TLS", "=tcp", ""])
def test_what_is_no_pair_is_refused_with_an_example(pair: str) -> None:
    with pytest.raises(ConfigError, match=f"--ucx is '{pair}'; write NAME=VALUE, such as UCX_TLS=tcp"):
        transfer_options_of(False, [], [pair])


def test_a_setting_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ucx PATH is no setting of UCX"):
        transfer_options_of(False, [], ["PATH=/tmp"])
