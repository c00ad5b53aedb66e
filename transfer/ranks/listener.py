"""Where the rank processes of an engine that is being started find it."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from pathlib import Path

from dynrt.runtime.errors import RankLostError
from dynrt.transfer.ranks.messages import FromRank
from dynrt.transfer.ranks.rank_socket import RankSocket
from dynrt.transfer.ranks.remote import RemoteRank


class RankListener:
    """A socket in a directory of its own, which only this user can enter and which is gone after `accept_all`."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._directory = Path(tempfile.mkdtemp(prefix="dynrt-ranks-"))
        self.path = str(self._directory / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(num_ranks)

    def accept_all(self, timeout_s: float) -> list[RemoteRank]:
        """All ranks, in order. Raises RankLostError if some do not come in time."""
        deadline = time.monotonic() + timeout_s
        try:
            ranks = [self._accept(deadline) for _ in range(self._num_ranks)]
        finally:
            self.close()
        ranks.sort(key=lambda rank: rank.rank)
        numbers = [rank.rank for rank in ranks]
        assert numbers == list(range(self._num_ranks)), f"ranks {numbers} came"
        for rank in ranks:
            rank.join(ranks)
        return ranks

    def close(self) -> None:
        """No rank can come any more."""
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self, deadline: float) -> RemoteRank:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise RankLostError(f"not all {self._num_ranks} ranks of this engine have come") from None
        return RemoteRank(RankSocket[FromRank](connection, FromRank), deadline - time.monotonic())
