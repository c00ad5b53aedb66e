"""One worker's agents, one per rank, with whatever is to be put between them and the transfer thread."""

from __future__ import annotations

from collections.abc import Sequence

from dynrt.runtime.errors import ConfigError
from dynrt.transfer.agent import Agent, NixlError
from dynrt.transfer.faults import FaultyAgent
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.memory import RankMemory
from dynrt.transfer.nixl_agent import NixlAgent
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.ranks.remote import RemoteRank
from dynrt.transfer.throttle import ThrottledAgent


def open_agents(
    incarnation: str,
    geometry: Sequence[KvGeometry],
    memory: Sequence[RankMemory],
    options: TransferOptions,
) -> list[Agent]:
    """Registers the memory at once. Raises ConfigError if NIXL cannot be set up as the options say."""
    try:
        return [
            _wrap(_open(f"{incarnation}:{rank}", rank, shape, memory[rank], options.backends), shape, options)
            for rank, shape in enumerate(geometry)
        ]
    except NixlError as error:
        raise ConfigError(f"{error}; --nixl-backend and --ucx say how it is set up") from error


def _open(name: str, rank: int, geometry: KvGeometry, memory: RankMemory, backends: Sequence[str]) -> Agent:
    if isinstance(memory, RemoteRank):
        memory.open(name, backends)
        return memory
    return NixlAgent(name, rank, geometry, memory, backends)


def _wrap(agent: Agent, geometry: KvGeometry, options: TransferOptions) -> Agent:
    if options.throttle is not None:
        agent = ThrottledAgent(agent, options.throttle)
    if options.faults:
        agent = FaultyAgent(agent, options.faults, geometry.num_blocks)
    return agent
