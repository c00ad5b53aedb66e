"""From the command line and the environment to the endpoint's options; room for many connections."""

from __future__ import annotations

import resource
from argparse import Namespace
from typing import Any

import pytest

from dynrt.runtime import cli
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.open_files import allow_many
from dynrt.runtime.serve import endpoint_options


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parses a command line of `dynrt serve` without serving."""

    def parse(*arguments: str) -> Namespace:
        given: list[Namespace] = []
        monkeypatch.setattr("dynrt.runtime.serve.serve", lambda namespace: given.append(namespace) or 0)
        assert cli.main(["serve", *arguments]) == 0
        return given[0]

    return parse


@pytest.mark.parametrize(
    ("variable", "keys"),
    [("", ()), ("one", ("one",)), ("one,two", ("one", "two")), (" one ,\n two,", ("one", "two"))],
)
def test_keys_of_the_environment(parsed: Any, variable: str, keys: tuple[str, ...]) -> None:
    assert endpoint_options(parsed(), {"DYNRT_API_KEYS": variable}).api_keys == keys


def test_defaults_are_those_of_the_options(parsed: Any) -> None:
    assert endpoint_options(parsed(), {}) == EndpointOptions()


def test_every_flag(parsed: Any) -> None:
    arguments = parsed(
        *("--api-key-file", "keys", "--open-metrics", "--allow-unauthenticated"),
        *("--cors-origin", "https://a", "--cors-origin", "https://b"),
        *("--tls-cert", "c", "--tls-key", "k", "--uds", "/s", "--uds-mode", "660"),
    )
    assert endpoint_options(arguments, {}) == EndpointOptions(
        api_key_file="keys",
        guard_metrics=False,
        allow_unauthenticated=True,
        cors_origins=("https://a", "https://b"),
        tls_cert="c",
        tls_key="k",
    )
    assert (arguments.uds, arguments.uds_mode) == ("/s", 0o660)


def test_many_files_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_many()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65_536, hard), hard)
        allow_many()  # never lowers it
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65_536, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
