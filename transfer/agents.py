"""One worker's agents, one per rank, with whatever is to be put between them and the transfer thread."""

from __future__ import annotations

from collections.abc import Sequence

from dynrt.transfer.agent import Agent
from dynrt.transfer.faults import FaultyAgent
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.nixl_agent import NixlAgent
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.throttle import ThrottledAgent


def open_agents(
    incarnation: str,
    geometry: Sequence[KvGeometry],
    regions: Sequence[Sequence[KvRegion]],
    options: TransferOptions,
) -> list[Agent]:
    """Registers the memory at once. Raises NixlError."""
    return [
        _wrap(NixlAgent(f"{incarnation}:{rank}", rank, shape, regions[rank]), shape, options)
        for rank, shape in enumerate(geometry)
    ]


def _wrap(agent: Agent, geometry: KvGeometry, options: TransferOptions) -> Agent:
    if options.throttle is not None:
        agent = ThrottledAgent(agent, options.throttle)
    if options.faults:
        agent = FaultyAgent(agent, options.faults, geometry.num_blocks)
    return agent
