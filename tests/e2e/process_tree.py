"""What the kernel knows of processes: who descends from whom, what they listen on, which shared memory is orphaned."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TCP_LISTEN = "0A"
ENDED = ("X", "Z")  # gone, or a zombie


def is_alive(pid: int) -> bool:
    """Zombies are not."""
    return _state_and_parent(pid)[0] not in ENDED


def descendants(pid: int) -> set[int]:
    """All living processes below `pid`."""
    parents = {child: _state_and_parent(child)[1] for child in _pids()}
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return {child for child in found if is_alive(child)}


def open_fds() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))


class Socket(NamedTuple):
    protocol: str
    address: str
    port: int


def listening(pids: Iterable[int]) -> set[Socket]:
    """Every TCP socket that listens and every UDP socket, of any of the processes."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return {
        socket
        for protocol in ("tcp", "tcp6", "udp", "udp6")
        for socket, inode in _sockets(protocol)
        if inode in inodes
    }


def orphaned_shared_memory() -> set[str]:
    """Segments in /dev/shm, and of System V, that no living process has mapped or open."""
    in_use = {name for pid in _pids() for name in _shared_memory_of(pid)}
    posix = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} - in_use
    system_v = {
        f"shmid {line.split()[1]}"
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        if line.split()[6] == "0"  # nattch
    }
    return posix | system_v


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Segments in /dev/shm that they have mapped or open, and those of System V that they have made."""
    makers = set(pids)
    segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    system_v = {f"shmid {fields[1]}" for fields in segments if int(fields[4]) in makers}
    return system_v.union(*map(_shared_memory_of, makers))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return state, int(parent)


def _links(pid: int) -> Iterator[str]:
    try:
        with os.scandir(
            f"/proc/{pid}/fd"
        ) as entries:  # left in the middle, it would warn when it is collected
            for entry in entries:
                yield os.readlink(entry.path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return  # it, or that descriptor, has gone meanwhile


def _socket_inodes(pid: int) -> set[str]:
    return {link[8:-1] for link in _links(pid) if link.startswith("socket:[")}


def _sockets(protocol: str) -> Iterator[tuple[Socket, str]]:
    for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
        fields = line.split()
        if protocol.startswith("udp") or fields[3] == TCP_LISTEN:
            address, port = fields[1].split(":")
            yield Socket(protocol, _address(address), int(port, 16)), fields[9]


def _address(hexadecimal: str) -> str:
    """The kernel prints addresses as 32-bit words in host order."""
    words = [int(hexadecimal[at : at + 8], 16) for at in range(0, len(hexadecimal), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _shared_memory_of(pid: int) -> set[str]:
    try:
        mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {name for name in (*mapped, *_links(pid)) if name.startswith("/dev/shm/")}
