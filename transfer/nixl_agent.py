"""One rank's NIXL agent: registered KV memory, peers, writes and notifications. One thread makes all its calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dynrt.transfer.agent import NixlError, WriteState
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.units import UnitRange

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


class _Peer(msgspec.Struct, frozen=True):
    name: str
    blocks: Any  # prepared list of the peer's (layer, block)s
    num_blocks: int


class NixlAgent:
    """`name` must be new in the world: NIXL refuses a second agent of a name it knows. Raises NixlError."""

    def __init__(self, name: str, geometry: KvGeometry, regions: Sequence[KvRegion]) -> None:
        devices = {region.device for region in regions}
        assert len(regions) == geometry.num_layers and len(devices) == 1, (
            "one region per layer, all on one device"
        )
        device = devices.pop()
        self._geometry = geometry
        self._memory, self._device = ("DRAM", 0) if device is None else ("VRAM", device)
        self._peers: dict[str, _Peer] = {}
        self._unreleased: list[Any] = []  # handles that NIXL would not let go of yet
        self.region_addresses = [region.address for region in regions]
        try:
            config = nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
            self._agent = nixl.nixl_agent(name, config)
            memory = [(region.address, region.num_bytes, self._device, "") for region in regions]
            self._registered = self._agent.register_memory(memory, mem_type=self._memory)
            own = _strided(
                self.region_addresses, geometry.num_blocks, geometry.layer_block_bytes, self._device
            )
            self._blocks = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, mem_type=self._memory)
            card = AgentCard(self._agent.get_agent_metadata(), self._memory, self._device)
        except _NIXL_ERRORS as error:
            raise NixlError(f"NIXL agent {name} cannot be set up: {_describe(error)}") from error
        self.metadata = _encode_card(card)

    def connect_peer(
        self, incarnation: str, metadata: bytes, addresses: Sequence[int], num_blocks: int
    ) -> None:
        """Make `post_write` to `incarnation` possible; a known one is left as it is. Raises NixlError."""
        if incarnation in self._peers:
            return
        card = _decode_card(metadata)
        if len(addresses) != self._geometry.num_layers:
            raise NixlError(f"{incarnation} has {len(addresses)} layers, not {self._geometry.num_layers}")
        theirs = _strided(addresses, num_blocks, self._geometry.layer_block_bytes, card.device)
        try:
            name = self._agent.add_remote_agent(card.metadata)
            blocks = self._agent.prep_xfer_dlist(name, theirs, mem_type=card.memory)
            self._agent.make_connection(name)
        except _NIXL_ERRORS as error:
            raise NixlError(f"cannot connect to {incarnation}: {_describe(error)}") from error
        self._peers[incarnation] = _Peer(name, blocks, num_blocks)

    def remove_peer(self, incarnation: str) -> None:
        """Disconnect. Recalls nothing that was posted. Unknown: no-op."""
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        try:
            peer.blocks.release()
            self._agent.remove_remote_agent(peer.name)
        except _NIXL_ERRORS as error:
            log.warning("peer %s left with %s", incarnation, _describe(error))

    def post_write(
        self,
        peer: str,
        units: UnitRange,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        notification: bytes,
    ) -> Any:
        """Post one WRITE of blocks `source_ids` of each layer in `units`; its handle. Raises NixlError."""
        known = self._peers.get(peer)
        if known is None:
            raise NixlError(f"{peer} is not connected")
        local = _block_indices(units, source_ids, self._geometry.num_blocks)
        remote = _block_indices(units, target_ids, known.num_blocks)
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", self._blocks, local, known.blocks, remote, notification
            )
            self._agent.transfer(handle)
        except _NIXL_ERRORS as error:
            raise NixlError(f"write to {peer}: {_describe(error)}") from error
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
        return [notification for received in by_sender.values() for notification in received]

    def notify(self, peer: str, notification: bytes) -> None:
        """Send a notification that is ordered against nothing. Raises NixlError."""
        known = self._peers.get(peer)
        if known is None:
            raise NixlError(f"{peer} is not connected")
        try:
            self._agent.send_notif(known.name, notification)
        except _NIXL_ERRORS as error:
            raise NixlError(f"notification to {peer}: {_describe(error)}") from error

    def close(self) -> None:
        """Disconnect from all peers and unregister the memory."""
        for incarnation in list(self._peers):
            self.remove_peer(incarnation)
        try:
            self._blocks.release()
            self._agent.deregister_memory(self._registered)
        except _NIXL_ERRORS as error:
            log.warning("agent closed with %s", _describe(error))


def _strided(
    addresses: Sequence[int], num_blocks: int, block_bytes: int, device: int
) -> npt.NDArray[np.uint64]:
    """NIXL's compressed list of all blocks of all layers: rows of (address, length, device, stride, count)."""
    rows = [(address, block_bytes, device, block_bytes, num_blocks) for address in addresses]
    return np.array(rows, dtype=np.uint64)


def _block_indices(units: UnitRange, block_ids: Sequence[int], num_blocks: int) -> npt.NDArray[np.int32]:
    """Where blocks `block_ids` of the layers in `units` stand in a `_strided` list; NIXL merges neighbours."""
    layers = np.arange(units.first_layer, units.first_layer + units.num_layers, dtype=np.int32)
    ids = np.asarray(block_ids, dtype=np.int32)
    assert ids.min() >= 0 and ids.max() < num_blocks, f"block ids reach from {ids.min()} to {ids.max()}"
    return (layers[:, None] * np.int32(num_blocks) + ids[None, :]).ravel()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
