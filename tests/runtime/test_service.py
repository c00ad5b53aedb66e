"""Notices to systemd: what it gets, that nobody else speaks for the service, and that the docs' units are valid."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynrt.runtime.service import ServiceNotices

PAGE = Path(__file__).parents[2] / "docs" / "systemd.md"
UNITS = dict(re.findall(r"```ini\n# /etc/systemd/system/(\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """What systemd would put into NOTIFY_SOCKET, and its end of that."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        receiver.setblocking(False)
        yield name, receiver


def test_ready_and_stopping_are_told(manager: tuple[str, socket.socket]) -> None:
    name, receiver = manager
    service = ServiceNotices({"NOTIFY_SOCKET": name})
    service.ready("dynrt serves llama")
    service.stopping()
    assert receiver.recv(200) == b"READY=1\nSTATUS=dynrt serves llama"
    assert receiver.recv(200) == b"STOPPING=1\nSTATUS=draining"


def test_children_do_not_inherit_the_socket() -> None:
    environment = {"NOTIFY_SOCKET": "/run/notify", "HOME": "/"}
    ServiceNotices(environment)
    assert environment == {"HOME": "/"}


def test_outside_systemd_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ServiceNotices({}).ready("dynrt serves llama")
    assert not caplog.records


def test_a_notice_that_is_lost_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceNotices({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("dynrt serves llama")
    assert [record.message for record in caplog.records] == ["systemd was not told"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", UNITS)
def test_units_of_the_docs_are_valid(name: str, tmp_path: Path) -> None:
    unit = tmp_path / name
    unit.write_text(UNITS[name].replace("/opt/dynrt/bin/dynrt", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_docs_have_units() -> None:
    assert set(UNITS) == {"dynrt.service", "dynrt-prefill@.service"}
