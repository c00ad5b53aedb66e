"""One rank's NIXL agent: registered KV memory, peers, writes and notifications. One thread makes all its calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import msgspec

from dynrt.transfer.agent import NixlError, WriteState
from dynrt.transfer.cells import cell_indices, cell_rows
from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.mapping import KvMapping, Route, Slice
from dynrt.transfer.write import Write

log = logging.getLogger("dynrt.transfer")


def _import_bindings() -> Any:
    """`nixl` chooses among its flavours by torch's CUDA; beside a torch without one it imports all of torch to see so.

    A flavour's wheel may also be there without the package that chooses.
    """
    names = ("nixl_cu12", "nixl") if version("torch").endswith("+cpu") else ("nixl", "nixl_cu12")
    try:
        return import_module(f"{names[0]}._api")
    except ImportError:
        return import_module(f"{names[1]}._api")


nixl = _import_bindings()

# The bindings' exceptions have no common root.
_NIXL_ERRORS = tuple(
    value
    for value in vars(nixl.nixlBind).values()
    if isinstance(value, type) and issubclass(value, Exception)
)


class AgentCard(msgspec.Struct, frozen=True, array_like=True):
    """What a peer must know of an agent beside addresses; opaque to the runtime, which carries it."""

    metadata: bytes
    memory: str  # NIXL's name of the memory kind: "DRAM", "VRAM"
    device: int


_encode_card = msgspec.msgpack.Encoder().encode
_decode_card = msgspec.msgpack.Decoder(AgentCard).decode


class _Path(msgspec.Struct, frozen=True):
    """NIXL's prepared lists of all cells on both sides of a route."""

    own: Any
    theirs: Any


class _Peer(msgspec.Struct, frozen=True):
    """`names`: its ranks' agents that this rank writes to; `paths`: by the index of each route from here."""

    names: dict[int, str]
    paths: dict[int, _Path]


class NixlAgent:
    """`name` must be new in the world: NIXL refuses a second agent of a name it knows. Raises NixlError."""

    def __init__(
        self,
        name: str,
        rank: int,
        geometry: KvGeometry,
        regions: Sequence[KvRegion],
        backends: Sequence[str] = ("UCX",),
    ) -> None:
        devices = {region.device for region in regions}
        assert len(regions) == geometry.num_layers and len(devices) == 1, (
            "one region per layer, all on one device"
        )
        device = devices.pop()
        self._rank = rank
        self._memory, self._device = ("DRAM", 0) if device is None else ("VRAM", device)
        self._peers: dict[str, _Peer] = {}
        self._own_cells: dict[Slice, Any] = {}  # prepared lists, shared by all peers that take the same
        self.num_polls = 0
        self._unreleased: list[Any] = []  # handles that NIXL would not let go of yet
        self.region_addresses = [region.address for region in regions]
        try:
            config = nixl.nixl_agent_config(backends=list(backends), enable_prog_thread=False)
            self._agent = nixl.nixl_agent(name, config)
            _check_backends(self._agent, backends)
            memory = [(region.address, region.num_bytes, self._device, "") for region in regions]
            self._registered = self._agent.register_memory(memory, mem_type=self._memory)
            card = AgentCard(self._agent.get_agent_metadata(), self._memory, self._device)
        except _NIXL_ERRORS as error:
            raise NixlError(f"NIXL agent {name} cannot be set up: {_describe(error)}") from error
        self.metadata = _encode_card(card)

    def connect_peer(self, peer: ConnectPeer, mapping: KvMapping) -> None:
        """Make `post_write` to this peer possible; a known one is left as it is. Raises NixlError."""
        if peer.incarnation in self._peers:
            return
        known = self._peers[peer.incarnation] = _Peer({}, {})
        try:
            for index, route in enumerate(mapping.routes):
                if route.source.rank == self._rank:
                    known.paths[index] = self._connect(known, peer, route)
        except NixlError:
            self.remove_peer(peer.incarnation)
            raise

    def _connect(self, known: _Peer, peer: ConnectPeer, route: Route) -> _Path:
        rank, addresses = route.target.rank, peer.region_addresses[route.target.rank]
        if len(addresses) != len(self.region_addresses):
            raise NixlError(
                f"{peer.incarnation} has {len(addresses)} layers, not {len(self.region_addresses)}"
            )
        card = _decode_card(peer.agent_metadata[rank])
        rows = cell_rows(addresses, route.target, card.device)
        try:
            if rank not in known.names:
                known.names[rank] = self._agent.add_remote_agent(card.metadata)
                self._agent.make_connection(known.names[rank])
            theirs = self._agent.prep_xfer_dlist(known.names[rank], rows, mem_type=card.memory)
            return _Path(self._prepare_own(route.source), theirs)
        except _NIXL_ERRORS as error:
            raise NixlError(f"cannot connect to {peer.incarnation}: {_describe(error)}") from error

    def _prepare_own(self, cells: Slice) -> Any:
        if cells not in self._own_cells:
            rows = cell_rows(self.region_addresses, cells, self._device)
            own = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, mem_type=self._memory)
            self._own_cells[cells] = own
        return self._own_cells[cells]

    def remove_peer(self, incarnation: str) -> None:
        """Disconnect. Recalls nothing that was posted. Unknown: no-op."""
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        try:
            for path in peer.paths.values():
                path.theirs.release()
            for name in peer.names.values():
                self._agent.remove_remote_agent(name)
        except _NIXL_ERRORS as error:
            log.warning("peer %s left with %s", incarnation, _describe(error))

    def post_write(self, write: Write, notification: bytes) -> Any:
        """Post one WRITE; its handle. The notification goes to the target rank's agent. Raises NixlError."""
        known = self._peers.get(write.peer)
        if known is None:
            raise NixlError(f"{write.peer} is not connected")
        path = known.paths[write.units.route]
        local = cell_indices(write.route.source, write.units, write.source_pieces)
        remote = cell_indices(write.route.target, write.units, write.target_pieces)
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", path.own, local, path.theirs, remote, notification
            )
            self._agent.transfer(handle)
        except _NIXL_ERRORS as error:
            raise NixlError(f"write to {write.peer}: {_describe(error)}") from error
        return handle

    def poll_write(self, handle: Any) -> WriteState:
        """Where that write is; drives the transport as well."""
        try:
            return WriteState(self._agent.check_xfer_state(handle))
        except _NIXL_ERRORS as error:
            log.warning("write failed: %s", _describe(error))
            return WriteState.FAILED

    def release_write(self, handle: Any) -> None:
        """Let go of a handle. NIXL may refuse while the transfer is active; it is asked again at later polls."""
        try:
            self._agent.release_xfer_handle(handle)
        except _NIXL_ERRORS:
            self._unreleased.append(handle)

    def poll_notifications(self) -> list[bytes]:
        """What has come since the last call; drives the transport, as nothing else does on a receiver."""
        if self._unreleased:
            again, self._unreleased = self._unreleased, []
            for handle in again:
                self.release_write(handle)
        by_sender = self._agent.get_new_notifs()
        self.num_polls += 1
        return [notification for received in by_sender.values() for notification in received]

    def notify(self, peer: str, notification: bytes) -> None:
        """Send a notification that is ordered against nothing, to one of the peer's ranks. Raises NixlError."""
        known = self._peers.get(peer)
        if known is None or not known.names:
            raise NixlError(f"{peer} is not connected")
        try:
            self._agent.send_notif(next(iter(known.names.values())), notification)
        except _NIXL_ERRORS as error:
            raise NixlError(f"notification to {peer}: {_describe(error)}") from error

    def close(self) -> None:
        """Disconnect from all peers and unregister the memory."""
        for incarnation in list(self._peers):
            self.remove_peer(incarnation)
        try:
            for own in self._own_cells.values():
                own.release()
            self._agent.deregister_memory(self._registered)
        except _NIXL_ERRORS as error:
            log.warning("agent closed with %s", _describe(error))


def _check_backends(agent: Any, backends: Sequence[str]) -> None:
    """NIXL only warns of a plug-in that it does not have. Raises NixlError."""
    there = agent.get_plugin_list()
    missing = [name for name in backends if name not in there]
    if missing:
        raise NixlError(f"NIXL has no backend {missing[0]!r}; it has {', '.join(sorted(there))}")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
