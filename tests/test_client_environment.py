"""client_environment: builds once, refuses what is not pinned, repairs what was cut short, keeps its deadline."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest
from client_environment import ClientEnvironmentError, client_node, client_python

BUILD_DEADLINE_S = 140.0  # one build takes 5 s; a busy machine needs its time


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dynrt" / "environments"


@pytest.mark.parametrize(
    "requirement", ["six", "six>=1.17.0", "six==1.*", "six==1.17.0,<2", "-r file", "./six"]
)
def test_requirement_that_is_not_pinned_is_refused(cache: Path, requirement: str) -> None:
    with pytest.raises(ClientEnvironmentError, match="is not pinned"):
        client_python("six", ["idna==3.10", requirement])
    assert not cache.exists()


@pytest.mark.parametrize("package", ["openai", "openai@latest", "openai@^6.49.0", "file:../x", "--global"])
def test_npm_package_that_is_not_pinned_is_refused(cache: Path, package: str) -> None:
    with pytest.raises(ClientEnvironmentError, match="is not pinned"):
        client_node("node", ["@scope/name@1.0.0", package])
    assert not cache.exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_environment_is_isolated_kept_and_repaired(cache: Path) -> None:
    python = client_python("six", ["six==1.17.0"], deadline_s=BUILD_DEADLINE_S)
    code = "import six, importlib.util; print(six.__version__, importlib.util.find_spec('msgspec'))"
    printed = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["1.17.0", "None"]
    assert python.is_relative_to(cache)

    marker = python.parent.parent / "marker"
    marker.touch()
    assert client_python("six", ["six==1.17.0"], deadline_s=0.0) == python  # kept: no time to build
    assert marker.exists()

    (python.parent.parent / ".complete").unlink()  # as if the build had been cut short
    assert client_python("six", ["six==1.17.0"], deadline_s=BUILD_DEADLINE_S) == python
    assert not marker.exists()


def test_build_that_misses_its_deadline_leaves_nothing_usable(cache: Path) -> None:
    with pytest.raises(ClientEnvironmentError, match="did not end within the deadline"):
        client_python("six", ["six==1.17.0"], deadline_s=0.0)
    assert not list(cache.glob("*/.complete"))


def test_waiting_for_another_builder_ends_at_the_deadline(cache: Path) -> None:
    with pytest.raises(ClientEnvironmentError, match="did not end"):
        client_python("six", ["six==1.17.0"], deadline_s=0.0)
    [lock_path] = cache.glob("*.lock")
    with lock_path.open("w") as other_builder:
        fcntl.flock(other_builder, fcntl.LOCK_EX)
        with pytest.raises(ClientEnvironmentError, match="another process"):
            client_python("six", ["six==1.17.0"], deadline_s=0.0)
