"""A rank in a process of its own, over KV memory that its parent maps as well, steered through a pipe."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from layout_rig import NUM_LAYERS, Values

from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.ranks.listener import RankListener
from dynrt.transfer.ranks.remote import RemoteRank

START_LIMIT_S = 60.0
END_LIMIT_S = 20.0


def map_arena(path: Path, shape: tuple[int, int]) -> Values:
    """[layer, value], shared with whoever maps the file as well."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint16).reshape(shape)


def serve(socket_path: str, rank: int, geometry: KvGeometry, arena_path: Path, pipe: Connection) -> None:
    """The child: a server over its part of the memory; what its model would tell it comes through the pipe."""
    from dynrt.transfer.ranks.server import RankServer

    num_values = arena_path.stat().st_size // 2
    arena = map_arena(arena_path, (NUM_LAYERS, num_values // NUM_LAYERS))
    size = geometry.num_blocks * geometry.layer_block_bytes
    server = RankServer(socket_path, rank, geometry, [KvRegion(layer.ctypes.data, size) for layer in arena])
    server.start()
    while (told := pipe.recv()) is not None:
        server.layer_written(*told, None)


class RankProcesses:
    """All ranks of one worker."""

    def __init__(self, geometry: Sequence[KvGeometry], arena_paths: Sequence[Path]) -> None:
        listener = RankListener(len(geometry))
        context = multiprocessing.get_context("spawn")
        self.processes, self._pipes = [], []
        for rank, shape in enumerate(geometry):
            pipe, childs_end = context.Pipe()
            arguments = listener.path, rank, shape, arena_paths[rank], childs_end
            self.processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self._pipes.append(pipe)
            self.processes[-1].start()
            childs_end.close()
        self.remote: list[RemoteRank] = listener.accept_all(START_LIMIT_S)

    def layer_written(self, rank: int, step: int, layer: int) -> None:
        """That rank has written its part."""
        self._pipes[rank].send((step, layer))

    def stop(self) -> None:
        """Their agents are closed by now."""
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(END_LIMIT_S)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"

    def kill(self) -> None:
        for rank in self.remote:
            rank.let_go()
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join(END_LIMIT_S)
