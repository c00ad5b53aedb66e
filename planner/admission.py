"""Which requests are refused at once because they would wait for too long (sans-IO)."""

from __future__ import annotations

import msgspec

from dynrt.planner.candidates import Candidate
from dynrt.planner.plan import NoPlan


class AdmissionLimits(msgspec.Struct, frozen=True):
    """None: no limit."""

    max_ttft_s: float | None = None  # predicted time to first token
    max_waiting_requests: int | None = None  # on one worker, until their first token


NO_LIMITS = AdmissionLimits()


def within_limits(candidates: list[Candidate], limits: AdmissionLimits) -> list[Candidate]:
    """Those that may prefill one more request."""
    if limits.max_waiting_requests is not None:
        bound = limits.max_waiting_requests
        candidates = [candidate for candidate in candidates if candidate.waiting_requests < bound]
    if limits.max_ttft_s is not None:
        limit_ms = limits.max_ttft_s * 1e3
        candidates = [candidate for candidate in candidates if candidate.first_token_ms <= limit_ms]
    return candidates


def no_room(decodes: list[Candidate]) -> NoPlan:
    """A finished prompt for which none of these has blocks, and when one is expected to."""
    retry_after_s = min((candidate.queue_ms for candidate in decodes), default=0.0) / 1e3
    reason = "no decode worker has room for the finished prompt, nor can its prefill worker decode so much"
    return NoPlan("no_room", reason, retry_after_s)


def refusal(candidates: list[Candidate], limits: AdmissionLimits) -> NoPlan:
    """Why none of these candidates may prefill one more request, and when one of them is expected to."""
    with_room = within_limits(candidates, AdmissionLimits(max_waiting_requests=limits.max_waiting_requests))
    if not with_room:
        place_ms = min(candidate.queue_ms / candidate.waiting_requests for candidate in candidates)
        bound = limits.max_waiting_requests
        reason = f"{bound} requests or more wait on every worker that could prefill, and {bound} is the limit"
        return NoPlan("queues_full", reason, place_ms / 1e3)
    assert limits.max_ttft_s is not None
    ttft_s = min(candidate.first_token_ms for candidate in with_room) / 1e3
    reason = (
        f"the first token is expected after {ttft_s:.1f} s at best, and {limits.max_ttft_s:g} s is the limit"
    )
    return NoPlan("too_slow", reason, ttft_s - limits.max_ttft_s)
