"""What is asked of the planner, and its answers."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from dynrt.planner.cost import Terms

PlanKind = Literal["remote", "local"]
RefusalKind = Literal["no_worker", "too_long", "too_slow", "queues_full", "no_room"]


class WorkerFacts(msgspec.Struct, frozen=True, dict=True):  # dict: for what follows from the facts
    """What the planner must know of a worker's incarnation. Sizes are those of all ranks together."""

    id: str
    role: Literal["prefill", "decode", "both"]
    block_size: int  # tokens
    context_length: int  # tokens
    kv_bytes_per_token: int
    num_layers: int
    num_blocks: int

    @cached_property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @cached_property
    def room_tokens(self) -> int:
        """The longest prompt and output together; the KV of the last token is never computed."""
        return min(self.context_length, self.capacity_tokens + 1)

    @cached_property
    def can_prefill(self) -> bool:
        return self.role != "decode"

    @cached_property
    def can_decode(self) -> bool:
        return self.role != "prefill"


class PlanRequest(msgspec.Struct, frozen=True):
    """A request to be placed. `prompt_ids` are packed little-endian uint32."""

    key: bytes
    salt: str  # requests of different salts (model, adapter, tenant) share no KV
    prompt_ids: bytes
    max_tokens: int
    local_prefill: Literal["auto", "never", "always"] = "auto"
    exclude: frozenset[str] = frozenset()  # workers that failed this request before
    is_admitted: bool = False  # under way already: it goes on, whatever the load
    prefilled_on: str = (
        ""  # this worker holds the finished prompt; `exclude` has decode workers without room for it
    )


class Choice(msgspec.Struct, frozen=True):
    """One way to serve a request. `prefill == decode` if it is local."""

    kind: PlanKind
    prefill: str
    decode: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    terms: Terms
    expected_ms: float  # for admission and Retry-After
    score_ms: float  # expected_ms, uncached tokens weighing more, up to 1 % by lot: for the choice

    def describe(self) -> str:
        """One line for people."""
        where = f"prefill on {self.prefill} (hit {self.prefill_hit_tokens} tokens)"
        if self.kind == "remote":
            where += f", decode on {self.decode} (hit {self.decode_hit_tokens} tokens)"
        return f"{self.kind}: {where}: expected {self.terms.describe()}, score {self.score_ms:.1f} ms"


class Plan(Choice, frozen=True):
    """The decision for one request: the choice made, what it was preferred to, and why."""

    prompt_tokens: int
    reason: str
    runner_up: Choice | None = None

    def explain(self) -> str:
        """For people, a line each: the choice, the reason, the runner-up."""
        lines = [f"{self.prompt_tokens} prompt tokens, {self.describe()}", f"because: {self.reason}"]
        if self.runner_up is not None:
            lines.append(f"instead of: {self.runner_up.describe()}")
        return "\n".join(lines)


class NoPlan(msgspec.Struct, frozen=True):
    """No worker can serve the request: none is up (it may be worth waiting), it fits none that is, or admission
    refuses it (planner/admission.py).
    """

    kind: RefusalKind
    reason: str
    retry_after_s: float = 0.0  # when admission is expected to let it in
