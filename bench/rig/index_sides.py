"""Prefix indexes under one interface: dynrt's own, and a peer in a process of its own environment."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec

from dynrt.planner.events import BlocksRemoved, BlocksStored, CacheEvents
from dynrt.planner.prefix_index import PrefixIndex
from dynrt.runtime.messages import pack_ids
from rig.index_workload import ROOT_ID, Event, Step, Stored

PEER = "ai-dynamo-runtime"
PEER_REQUIREMENT = "ai-dynamo-runtime==1.6.1"
NO_LIMIT = 1 << 40  # the bound on memory is not what is measured
ROOT = Path(__file__).parents[2]

Matches = list[dict[int, int]]  # of each prompt: blocks by worker
T = TypeVar("T")


class OurIndex:
    """Fed with cache events as they come from the control socket: in MessagePack, decoded on the clock."""

    def __init__(self, num_workers: int, block_size: int) -> None:
        self.index = PrefixIndex(Random(0), NO_LIMIT)
        self.block_size = block_size
        self._names = [f"w{worker}" for worker in range(num_workers)]
        self._workers = {name: worker for worker, name in enumerate(self._names)}
        self._next_seq = [0] * num_workers
        self._next_key = [1] * num_workers
        self._keys: list[dict[int, int]] = [{ROOT_ID: 0} for _ in range(num_workers)]  # by block id
        self._decode = msgspec.msgpack.Decoder(CacheEvents).decode
        for name in self._names:
            self.index.add_worker(name, block_size)

    def apply(self, events: Sequence[Event]) -> float:
        made = self.messages(events)
        return timed(lambda: self.take_in(made))[0]

    def messages(self, events: Iterable[Event]) -> list[tuple[str, bytes]]:
        """The events as they come from each worker."""
        return [self._message(event) for event in events]

    def take_in(self, messages: list[tuple[str, bytes]]) -> None:
        for name, message in messages:
            assert self.index.apply(name, self._decode(message)), f"{name}: refused"

    def look_up(self, prompts: Sequence[bytes]) -> tuple[float, Matches]:
        """From lists of ids: CPU seconds of the process, and the matches."""
        lists = [array("I", prompt).tolist() for prompt in prompts]
        cpu_s, hits = timed(lambda: [self.index.match("", pack_ids(ids)) for ids in lists])
        return cpu_s, [self._blocks(hit) for hit in hits]

    def look_up_packed(self, prompts: Sequence[bytes]) -> tuple[float, Matches]:
        """From packed bytes, as requests carry them."""
        cpu_s, hits = timed(lambda: [self.index.match("", prompt) for prompt in prompts])
        return cpu_s, [self._blocks(hit) for hit in hits]

    def serve(self, steps: Sequence[Step]) -> tuple[float, float, Matches]:
        """From lists of ids, with the events that follow each look-up: CPU seconds, the part of them that packs the
        lists, and the matches.
        """
        made = [(prompt, self.messages(events)) for prompt, events in steps]
        hits: list[dict[str, int]] = []
        listing_s = packing_s = 0.0
        began = time.process_time()
        for prompt, events in made:
            began_list = time.thread_time()
            ids = array("I", prompt).tolist()  # just before its use, as a request brings it
            began_packing = time.thread_time()
            packed = pack_ids(ids)
            packing_s += time.thread_time() - began_packing
            listing_s += began_packing - began_list
            hits.append(self.index.match("", packed))
            self.take_in(events)
        cpu_s = time.process_time() - began - listing_s
        return cpu_s, packing_s, [self._blocks(hit) for hit in hits]

    def _message(self, event: Event) -> tuple[str, bytes]:
        worker = event.worker
        keys = self._keys[worker]
        made: BlocksStored | BlocksRemoved
        if isinstance(event, Stored):
            first = self._next_key[worker]
            self._next_key[worker] += len(event.ids)
            new_keys = list(range(first, self._next_key[worker]))
            made = BlocksStored(keys[event.parent], new_keys, event.tokens)
            keys.update(zip(event.ids, new_keys, strict=True))
        else:
            made = BlocksRemoved([keys.pop(block_id) for block_id in event.ids])
        seq = self._next_seq[worker]
        self._next_seq[worker] += 1
        return self._names[worker], msgspec.msgpack.encode(CacheEvents(seq, [made]))

    def _blocks(self, hits: dict[str, int]) -> dict[int, int]:
        return {self._workers[name]: tokens // self.block_size for name, tokens in hits.items()}


class PeerIndex:
    """Dynamo's, driven with the same blocks."""

    def __init__(self, python: Path, block_size: int) -> None:
        script = Path(__file__).with_name("dynamo_index.py")
        self._process = subprocess.Popen(
            [str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._ask("new", block_size)

    def __enter__(self) -> PeerIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def apply(self, events: Sequence[Event]) -> float:
        cpu_s: float = self._ask("apply", [_plain(event) for event in events])
        return cpu_s

    def look_up(self, prompts: Sequence[bytes]) -> tuple[float, Matches]:
        answer: tuple[float, Matches] = self._ask("look_up", prompts)
        return answer

    def serve(self, steps: Sequence[Step]) -> tuple[float, float, Matches]:
        """From lists of ids, with the events that follow each look-up: CPU seconds, without and for hashing the
        ids of the events' blocks, and the matches.
        """
        plain = [(step.prompt, [_plain(event) for event in step.events]) for step in steps]
        answer: tuple[float, float, Matches] = self._ask("serve", plain)
        return answer

    def _ask(self, command: str, argument: object) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        pickle.dump((command, argument), stdin)
        stdin.flush()
        return pickle.load(stdout)


def peer_python() -> Path | str:
    """The interpreter of an environment that has the peer, or why there is none."""
    spec = importlib.util.spec_from_file_location(
        "client_environment", ROOT / "tests" / "client_environment.py"
    )
    assert spec is not None and spec.loader is not None
    environments = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environments)
    try:
        python: Path = environments.client_python(PEER, [PEER_REQUIREMENT])
    except environments.ClientEnvironmentError as error:
        return str(error)
    return python


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of the process, and the result."""
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def _plain(event: Event) -> tuple[int, int, list[int], bytes | None]:
    if isinstance(event, Stored):
        return event.worker, event.parent, event.ids, event.tokens
    return event.worker, ROOT_ID, event.ids, None
