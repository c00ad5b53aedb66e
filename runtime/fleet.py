"""The fleet: which workers are there, which pairs of them can hand off, and which have stopped answering."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from dynrt.runtime.channel import Channel
from dynrt.runtime.errors import ConfigError, MailboxFullError
from dynrt.runtime.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Refused,
    Register,
    ToEngine,
    Unknown,
    Welcome,
)
from dynrt.runtime.spawner import Process
from dynrt.runtime.worker import Worker
from dynrt.transfer.events import ConnectPeer, FencePeer, PeerConnected
from dynrt.transfer.layout import Mismatch
from dynrt.transfer.mapping import map_kv

log = logging.getLogger("dynrt.fleet")

MISFITS = "pair cannot hand off: decode computes its prompts itself, or gets them from other prefill workers"


class FleetObserver(Protocol):
    """Who wants to know of changes in the fleet."""

    def worker_up(self, worker: Worker) -> None: ...

    def worker_down(self, worker: Worker, reason: str) -> None: ...

    def pair_up(self, prefill: Worker, decode: Worker) -> None: ...

    def pair_down(self, prefill: Worker, decode: Worker) -> None: ...

    def tell(self, incarnation: str, message: ToEngine) -> None:
        """Send; a worker that takes no messages is ended for it."""


class Fleet:
    """All registered workers by incarnation. Learns from messages and exits; connects every eligible pair."""

    def __init__(self, runtime_id: str, model: str, heartbeat_interval_s: float, channel: Channel) -> None:
        self._runtime_id = runtime_id
        self._model = model
        self._heartbeat_interval_s = heartbeat_interval_s
        self._channel = channel
        self._workers: dict[str, Worker] = {}
        self._pairs: set[tuple[str, str]] = set()  # (prefill, decode) incarnations: handoffs can run
        self.changes = 0  # workers that came or went, ever
        self.observer: FleetObserver

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, incarnation: str) -> Worker | None:
        return self._workers.get(incarnation)

    def by_id(self, worker_id: str) -> Worker | None:
        return next((worker for worker in self if worker.id == worker_id), None)

    def refusal(self, register: Register) -> str | None:
        """Why this engine cannot be one of ours, naming both values."""
        if register.protocol_version != PROTOCOL_VERSION:
            return f"engine speaks protocol {register.protocol_version}, this runtime {PROTOCOL_VERSION}"
        if register.model != self._model:
            return f"engine serves model {register.model!r}, this runtime {self._model!r}"
        return None

    def register(self, worker_id: str, register: Register, process: Process | None, now: float) -> None:
        """Repeatable: an engine that did not hear our answer asks again."""
        if register.incarnation not in self._workers:
            self._add(Worker(worker_id, register, self._channel, process, now))
        welcome = Welcome(self._runtime_id, worker_id, self._heartbeat_interval_s)
        self.observer.tell(register.incarnation, welcome)

    def refuse(self, register: Register, reason: str) -> None:
        log.error("engine refused", extra={"incarnation": register.incarnation, "reason": reason})
        self._answer_stranger(register.incarnation, Refused(reason))

    def lost(self, incarnation: str, reason: str) -> None:
        """Its process has ended, for certain: whoever shared memory with it may stop waiting."""
        worker = self._workers.pop(incarnation, None)
        if worker is None:
            return
        self.changes += 1
        self._pairs = {pair for pair in self._pairs if incarnation not in pair}
        self._channel.forget(incarnation)
        worker.left()
        log.warning("worker lost", extra={"worker": worker.id, "incarnation": incarnation, "reason": reason})
        for other in self:
            self.observer.tell(other.incarnation, FencePeer(incarnation))
        self.observer.worker_down(worker, reason)

    def tell_unknown(self, incarnation: str) -> None:
        """To an engine that thinks it is one of ours: an earlier runtime at this address had it."""
        self._answer_stranger(incarnation, Unknown())

    def disband(self) -> None:
        """The channel is about to close: from now on, nobody is there to be told anything."""
        self._workers.clear()
        self._pairs.clear()

    def heard(self, worker: Worker, heartbeat: Heartbeat, now: float) -> None:
        worker.heard_at = now
        worker.step_age_s, worker.transfer_age_s = heartbeat.step_age_s, heartbeat.transfer_age_s

    def hung(self, now: float, heartbeat_limit_s: float, step_limit_s: float) -> Iterator[tuple[Worker, str]]:
        """Workers that live but do not work, and why we think so."""
        for worker in self:
            silent_s = now - worker.heard_at
            if silent_s > heartbeat_limit_s:
                yield worker, f"no heartbeat for {silent_s:.1f} s, the limit is {heartbeat_limit_s:g} s"
            elif worker.step_age_s > step_limit_s:
                yield worker, f"in one step for {worker.step_age_s:.1f} s, the limit is {step_limit_s:g} s"
            elif worker.transfer_age_s > step_limit_s:
                age_s = worker.transfer_age_s
                yield worker, f"its transfers stand still for {age_s:.1f} s, the limit is {step_limit_s:g} s"

    def peer_connected(self, prefill: Worker, message: PeerConnected) -> None:
        decode = self._workers.get(message.incarnation)
        if decode is None:
            return
        if message.error is not None:
            self._pair_failed(prefill, decode, message.error)
            return
        self._connected(prefill, decode)

    def _connected(self, prefill: Worker, decode: Worker) -> None:
        self._pairs.add((prefill.incarnation, decode.incarnation))
        log.info("pair connected", extra={"prefill": prefill.id, "decode": decode.id})
        self.observer.pair_up(prefill, decode)

    def _pair_failed(self, prefill: Worker, decode: Worker, reason: str) -> None:
        """Its connection could not be made, or broke and is being made again."""
        log.error("pair not connected", extra={"prefill": prefill.id, "decode": decode.id, "reason": reason})
        self._pairs.discard((prefill.incarnation, decode.incarnation))
        self.observer.pair_down(prefill, decode)

    def has_other_decode(self, prefill: str, decode: str) -> bool:
        """Whether `prefill` could hand off to another worker of the same kind as `decode`."""
        return any(other.incarnation != decode for other in self.decodes_like(prefill, decode))

    def decodes_like(self, prefill: str, decode: str) -> Iterator[Worker]:
        """Connected decode workers that do with the first token what `decode` does; none if it is gone."""
        model = self._workers.get(decode)
        for worker in self._workers.values():
            is_like = (
                model is not None and worker.register.first_token_from == model.register.first_token_from
            )
            if is_like and (prefill, worker.incarnation) in self._pairs:
                yield worker

    def pairs_to_connect(self) -> Iterator[tuple[Worker, Worker]]:
        """Eligible pairs that are not connected (yet)."""
        for prefill, decode in self._possible_pairs():
            if (
                pair_mismatch(prefill, decode) is None
                and (prefill.incarnation, decode.incarnation) not in self._pairs
            ):
                yield prefill, decode

    def check_partners(self) -> None:
        """Raises ConfigError if a worker fits none of the other pool, as both were started. Who joined is warned of."""
        started = [pair for pair in self._possible_pairs() if all(worker.is_spawned for worker in pair)]
        for worker in self:
            mismatches = [pair_mismatch(*pair) for pair in started if worker in pair]
            if mismatches and all(mismatches):
                raise ConfigError(
                    f"worker {worker.id} has no partner to hand off with: {mismatches[0]}; start both pools alike, "
                    "or no prefill workers (--prefill 0)"
                )

    def _possible_pairs(self) -> Iterator[tuple[Worker, Worker]]:
        for prefill in self:
            for decode in self:
                if prefill is not decode and prefill.prefills and decode.decodes:
                    yield prefill, decode

    def _add(self, worker: Worker) -> None:
        self._workers[worker.incarnation] = worker
        self.changes += 1
        log.info(
            "worker registered",
            extra={
                "worker": worker.id,
                "incarnation": worker.incarnation,
                "engine": worker.register.engine_kind,
                "version": worker.register.version,
                "pid": worker.register.pid,
            },
        )
        self.observer.worker_up(worker)
        self._warn_of_misfits(worker)
        for prefill, decode in self.pairs_to_connect():
            if worker in (prefill, decode):
                self._connect(prefill, decode)

    def _warn_of_misfits(self, worker: Worker) -> None:
        for pair in self._possible_pairs():
            mismatch = pair_mismatch(*pair)
            if worker in pair and mismatch is not None:
                prefill, decode = pair
                extra = {"prefill": prefill.id, "decode": decode.id, "because": str(mismatch)}
                log.warning(MISFITS, extra=extra)

    def _connect(self, prefill: Worker, decode: Worker) -> None:
        if prefill.register.kv_connector != "layerwise":
            self._connected(prefill, decode)  # by themselves, over the first request
            return
        # Decode first: it must be polling when prefill's connection arrives.
        self.observer.tell(decode.incarnation, introduction(prefill.register, will_push=False))
        self.observer.tell(prefill.incarnation, introduction(decode.register, will_push=True))

    def _answer_stranger(self, incarnation: str, message: Refused | Unknown) -> None:
        with suppress(MailboxFullError):  # it takes no messages, and it is not ours to kill
            self._channel.send(incarnation, message)


def pair_mismatch(prefill: Worker, decode: Worker) -> Mismatch | None:
    """Why the first cannot hand off to the second; None if it can."""
    ours, theirs = prefill.register, decode.register
    if ours.kv_connector != theirs.kv_connector:
        return Mismatch("kv_connector", ours.kv_connector, theirs.kv_connector)
    if ours.kv_connector != "layerwise":
        return _find_other_hash(ours.geometry[0].order, theirs.geometry[0].order)
    mapping = map_kv(ours.geometry, theirs.geometry)
    return mapping if isinstance(mapping, Mismatch) else None


def _find_other_hash(ours: str, theirs: str) -> Mismatch | None:
    """All that is told of caches that vLLM's connectors move. Sizes they compare themselves, when they meet."""
    return None if ours == theirs else Mismatch("vLLM's compatibility hash", ours, theirs)


def introduction(register: Register, will_push: bool) -> ConnectPeer:
    """Of this engine, to one that it is to be connected with."""
    return ConnectPeer(
        incarnation=register.incarnation,
        agent_metadata=register.agent_metadata,
        region_addresses=register.region_addresses,
        geometry=register.geometry,
        will_push=will_push,
    )
