"""The fleet: who may register, which pairs are connected, who hangs, and what the loss of a worker tells others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from registrations import GEOMETRY, NotingChannel, registration

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.fleet import MISFITS, Fleet, pair_mismatch
from dynrt.runtime.messages import Heartbeat, Refused, ToEngine, Unknown, Welcome
from dynrt.runtime.worker import Worker
from dynrt.transfer.events import ConnectPeer, FencePeer, PeerConnected
from dynrt.transfer.layout import KvGeometry


class Observer:
    """Notes what it is told."""

    def __init__(self, channel: NotingChannel) -> None:
        self._channel = channel
        self.news: list[tuple[str, ...]] = []

    def worker_up(self, worker: Worker) -> None:
        self.news.append(("up", worker.id))

    def worker_down(self, worker: Worker, reason: str) -> None:
        self.news.append(("down", worker.id, reason))

    def pair_down(self, prefill: Worker, decode: Worker) -> None:
        self.news.append(("pair down", prefill.id, decode.id))

    def pair_up(self, prefill: Worker, decode: Worker) -> None:
        self.news.append(("pair", prefill.id, decode.id))

    def tell(self, incarnation: str, message: ToEngine) -> None:
        self._channel.send(incarnation, message)


class Setting:
    """A fleet with ends to look at."""

    def __init__(self) -> None:
        self.channel = NotingChannel()
        self.observer = Observer(self.channel)
        self.fleet = Fleet("rt", "tiny", 0.5, self.channel)
        self.fleet.observer = self.observer

    def add(self, worker_id: str, role: Any, **changes: Any) -> Worker:
        self.fleet.register(worker_id, registration(f"inc-{worker_id}", role, **changes), None, now=0.0)
        worker = self.fleet.by_id(worker_id)
        assert worker is not None
        return worker

    def add_pair(self) -> tuple[Worker, Worker]:
        prefill, decode = self.add("p", "prefill"), self.add("d", "decode")
        self.fleet.peer_connected(prefill, PeerConnected(decode.incarnation))
        self.channel.take()
        return prefill, decode

    def unconnected(self) -> set[tuple[str, str]]:
        return {(prefill.id, decode.id) for prefill, decode in self.fleet.pairs_to_connect()}


@pytest.fixture
def setting() -> Setting:
    return Setting()


VLLM_CPU_ORDER = "block,head,vllm-cpu-amx"  # packed: nobody but vLLM on such a CPU can read it


def geometry(**changes: Any) -> list[Any]:
    return [msgspec.structs.replace(GEOMETRY, **changes)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 77}, "engine speaks protocol 77, this runtime 1"),
        ({"model": "huge"}, "engine serves model 'huge', this runtime 'tiny'"),
        ({}, None),
    ],
)
def test_refusal_names_both_values(setting: Setting, changes: dict[str, Any], reason: str | None) -> None:
    assert setting.fleet.refusal(registration("x", **changes)) == reason


def test_who_is_refused_is_told_and_not_kept(setting: Setting) -> None:
    setting.fleet.refuse(registration("x"), "no")
    assert setting.channel.take() == [("x", Refused("no"))]
    assert len(setting.fleet) == 0


def test_registration_can_be_repeated(setting: Setting) -> None:
    worker = setting.add("p", "prefill")
    assert setting.add("p", "prefill") is worker
    assert setting.channel.take() == [("inc-p", Welcome("rt", "p", 0.5))] * 2
    assert setting.observer.news == [("up", "p")]
    assert len(setting.fleet) == 1


def test_pair_is_introduced_decode_first(setting: Setting) -> None:
    setting.add("p", "prefill")
    setting.channel.take()
    setting.add("d", "decode")
    introductions = [
        (to, message) for to, message in setting.channel.take() if isinstance(message, ConnectPeer)
    ]
    assert introductions == [
        ("inc-d", ConnectPeer("inc-p", [b"inc-p"], [[1, 2]], [GEOMETRY], will_push=False)),
        ("inc-p", ConnectPeer("inc-d", [b"inc-d"], [[1, 2]], [GEOMETRY], will_push=True)),
    ]


def test_roles_say_who_pairs_with_whom(setting: Setting) -> None:
    for worker_id, role in (("p1", "prefill"), ("p2", "prefill"), ("d", "decode"), ("b", "both")):
        setting.add(worker_id, role)
    assert setting.unconnected() == {("p1", "d"), ("p2", "d"), ("p1", "b"), ("p2", "b"), ("b", "d")}


def test_pair_is_up_when_prefill_says_so(setting: Setting) -> None:
    setting.add_pair()
    assert ("pair", "p", "d") in setting.observer.news
    assert setting.unconnected() == set()


def test_pair_that_cannot_connect_stays_down(setting: Setting) -> None:
    prefill, _ = setting.add("p", "prefill"), setting.add("d", "decode")
    setting.fleet.peer_connected(prefill, PeerConnected("inc-d", "no route"))
    setting.fleet.peer_connected(prefill, PeerConnected("inc-gone"))
    assert setting.unconnected() == {("p", "d")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"geometry": geometry(block_size=24)}, "block_size is 16 on prefill and 24 on decode"),
        ({"geometry": geometry(dtype="bfloat16")}, "dtype is 'float32' on prefill and 'bfloat16' on decode"),
        ({"geometry": geometry(total_kv_heads=2)}, "model_kv_heads is 1 on prefill and 2 on decode"),
        (
            {"geometry": geometry(order=VLLM_CPU_ORDER), "engine_kind": "vllm"},
            f"order is '{GEOMETRY.order}' on prefill and '{VLLM_CPU_ORDER}' on decode",
        ),
    ],
)
def test_mismatch_names_the_field_and_both_values(
    setting: Setting, changes: dict[str, Any], message: str
) -> None:
    prefill = setting.add("p", "prefill", spawn_token="1")
    decode = setting.add("d", "decode", spawn_token="2", **changes)
    assert str(pair_mismatch(prefill, decode)) == message
    assert list(setting.fleet.pairs_to_connect()) == []
    with pytest.raises(ConfigError, match=f"worker p has no partner to hand off with: {message}; start both"):
        setting.fleet.check_partners()


def test_engine_that_joins_and_fits_nobody_is_told(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.add("p", "prefill", spawn_token="1")
    assert not caplog.records
    setting.add("d", "decode", geometry=geometry(dtype="bfloat16"))
    setting.fleet.check_partners()
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (record.message, vars(record)["because"]) == (
        MISFITS,
        "dtype is 'float32' on prefill and 'bfloat16' on decode",
    )


def test_own_connectors_pair_with_their_like_at_once(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """All that counts is vLLM's own word for what they are."""
    own = {"kv_connector": "nixl-pull"}
    setting.add("p", "prefill", geometry=geometry(order="block,vllm-a"), **own)
    setting.add("d", "decode", geometry=geometry(order="block,vllm-a", block_size=24), **own)
    setting.add("other", "decode", geometry=geometry(order="block,vllm-b"), **own)
    setting.add("ours", "decode")
    assert [news for news in setting.observer.news if news[0] == "pair"] == [("pair", "p", "d")]
    assert not [message for _to, message in setting.channel.take() if isinstance(message, ConnectPeer)]
    reasons = [vars(record)["because"] for record in caplog.records if record.message == MISFITS]
    assert reasons == [
        "vLLM's compatibility hash is 'block,vllm-a' on prefill and 'block,vllm-b' on decode",
        "kv_connector is 'nixl-pull' on prefill and 'layerwise' on decode",
    ]


def test_numbers_of_blocks_may_differ(setting: Setting) -> None:
    assert (
        pair_mismatch(
            setting.add("p", "prefill"), setting.add("d", "decode", geometry=geometry(num_blocks=9))
        )
        is None
    )


@pytest.mark.parametrize(
    "decode",
    [geometry(block_size=64), geometry(block_size=4), geometry() * 2],
    ids=["larger blocks", "smaller blocks", "more ranks than KV heads"],
)
def test_what_can_be_mapped_is_a_pair(setting: Setting, decode: list[KvGeometry]) -> None:
    prefill, other = setting.add("p", "prefill"), setting.add("d", "decode", geometry=decode)
    assert pair_mismatch(prefill, other) is None
    setting.fleet.check_partners()
    assert [(one.id, two.id) for one, two in setting.fleet.pairs_to_connect()] == [("p", "d")]


def test_one_partner_is_enough(setting: Setting) -> None:
    odd = geometry(dtype="float16")
    for worker_id, role, shape in (
        ("p", "prefill", geometry()),
        ("d", "decode", geometry()),
        ("p2", "prefill", odd),
    ):
        setting.add(worker_id, role, spawn_token=worker_id, geometry=shape)
    with pytest.raises(ConfigError, match="worker p2 has no partner"):
        setting.fleet.check_partners()
    setting.add("d2", "decode", spawn_token="d2", geometry=odd)
    setting.fleet.check_partners()


def test_pool_without_another_needs_no_partner(setting: Setting) -> None:
    setting.add("d", "decode")
    setting.fleet.check_partners()


def test_lost_worker_is_fenced_by_all_others(setting: Setting) -> None:
    setting.add_pair()
    setting.add("d2", "decode")
    setting.channel.take()
    setting.fleet.lost("inc-d", "it died")
    assert setting.channel.take() == [("inc-p", FencePeer("inc-d")), ("inc-d2", FencePeer("inc-d"))]
    assert setting.channel.forgotten == ["inc-d"]
    assert setting.observer.news[-1] == ("down", "d", "it died")
    setting.fleet.lost("inc-d", "again")
    assert setting.channel.take() == []
    setting.add("d", "decode")
    assert ("p", "d") in setting.unconnected(), "its pairs were forgotten with it"


def test_silence_is_a_hang(setting: Setting) -> None:
    worker = setting.add("d", "decode")
    assert list(setting.fleet.hung(10.0, 10.0, 300.0)) == []
    assert list(setting.fleet.hung(10.5, 10.0, 300.0)) == [
        (worker, "no heartbeat for 10.5 s, the limit is 10 s")
    ]
    setting.fleet.heard(worker, Heartbeat("inc-d", 0.0), 8.0)
    assert list(setting.fleet.hung(10.5, 10.0, 300.0)) == []


def test_endless_step_is_a_hang(setting: Setting) -> None:
    worker = setting.add("d", "decode")
    setting.fleet.heard(worker, Heartbeat("inc-d", 300.5), 1.0)
    assert list(setting.fleet.hung(1.0, 10.0, 300.0)) == [
        (worker, "in one step for 300.5 s, the limit is 300 s")
    ]
    setting.fleet.heard(worker, Heartbeat("inc-d", 0.0, 301.0), 1.5)
    assert [reason for _, reason in setting.fleet.hung(1.5, 10.0, 300.0)] == [
        "its transfers stand still for 301.0 s, the limit is 300 s"
    ]
    setting.fleet.heard(worker, Heartbeat("inc-d", 0.0), 2.0)
    assert list(setting.fleet.hung(2.0, 10.0, 300.0)) == []


def test_strangers_are_told_so_even_if_they_do_not_listen(setting: Setting) -> None:
    setting.fleet.tell_unknown("x")
    assert setting.channel.take() == [("x", Unknown())]
    setting.channel.full.add("x")
    setting.fleet.tell_unknown("x")
    setting.fleet.refuse(registration("x"), "no")


def test_pair_whose_connection_broke_is_no_pair_until_it_stands_again() -> None:
    setting = Setting()
    prefill, decode = setting.add_pair()
    setting.observer.news.clear()
    setting.fleet.peer_connected(prefill, PeerConnected(decode.incarnation, "a write failed"))
    assert setting.unconnected() == {("p", "d")}
    setting.fleet.peer_connected(prefill, PeerConnected(decode.incarnation))
    assert setting.unconnected() == set()
    assert setting.observer.news == [("pair down", "p", "d"), ("pair", "p", "d")]
