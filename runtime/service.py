"""What a process tells systemd that has started it as a service of Type=notify: sd_notify(3), without its library."""

from __future__ import annotations

import logging
import socket
from collections.abc import MutableMapping

log = logging.getLogger("dynrt.service")


class ServiceNotices:
    """`environment` loses NOTIFY_SOCKET, so that no process started from here speaks for the service.

    Without that variable nothing is told. A notice that does not arrive is logged, as systemd will act as if it were
    never sent.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str) -> None:
        """`status`: one line, for `systemctl status`."""
        self._tell(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._tell("STOPPING=1\nSTATUS=draining")

    def _tell(self, notice: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(notice.encode(), self._address)
        except OSError as error:
            log.warning("systemd was not told", extra={"notice": notice, "reason": str(error)})
