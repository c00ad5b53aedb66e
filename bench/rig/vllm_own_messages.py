"""What is said between a bench and a vLLM engine with a connector of vLLM's own: JSON, one message a line."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Connector = Literal["NixlPushConnector", "NixlPullConnector"]


class OwnEngineSettings(msgspec.Struct, frozen=True):
    """`arguments`: of vLLM's EngineArgs, without the connector's."""

    connector: Connector
    role: Literal["kv_producer", "kv_consumer"]
    side_channel_port: int  # where the connector answers its peer's handshake
    threads: int
    arguments: dict[str, Any]


class Ask(msgspec.Struct, frozen=True):
    """A greedy request."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any]


class Answered(msgspec.Struct, frozen=True):
    """Its end; times are CLOCK_MONOTONIC seconds."""

    token_ids: list[int]
    step_began_at: float  # the step that brought the first token
    first_token_at: float  # the end of that step
    received_at: float | None  # the connector told that all KV had come
    kv_transfer_params: dict[str, Any] | None  # for the request that goes on from here
