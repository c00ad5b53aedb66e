"""Which workers may play which part for a request, by role, room and connection, whatever the load (sans-IO)."""

from __future__ import annotations

import msgspec

from dynrt.planner.candidates import Candidate, Demand
from dynrt.planner.links import Links
from dynrt.planner.plan import PlanRequest


class Ways(msgspec.Struct, frozen=True):
    """What the request and the fleet leave to choose from, and why it is no more than that."""

    prefills: list[Candidate]  # for some decode worker
    locals: list[Candidate]
    decodes: list[Candidate]
    reason: str


def find_ways(request: PlanRequest, demand: Demand, candidates: list[Candidate], links: Links) -> Ways:
    """Who decodes must have room for prompt and output, who prefills for another for the prompt.

    Workers without room for a request are to it as if they were not there.
    """
    total_tokens = demand.prompt_tokens + demand.output_tokens
    roomy = [candidate for candidate in candidates if total_tokens <= candidate.facts.room_tokens]
    if request.prefilled_on:
        return _ways_on(request, candidates, roomy, links)
    decodes = [candidate for candidate in roomy if candidate.facts.can_decode]
    if not decodes:
        has_smaller = any(candidate.facts.can_decode for candidate in candidates)
        return Ways([], roomy, [], "too large for decode workers" if has_smaller else "no decode worker")
    if request.local_prefill == "always":
        return Ways([], decodes, decodes, "local prefill always")
    prefills = [
        candidate
        for candidate in candidates
        if candidate.facts.can_prefill
        and demand.prompt_tokens < candidate.facts.room_tokens
        and _is_connected(candidate, decodes, links)
    ]
    if not prefills:
        return Ways([], decodes, decodes, "no connected pair")
    if request.local_prefill == "never":
        return Ways(prefills, [], decodes, "local prefill never")
    return Ways(prefills, decodes, decodes, "expected sooner")


def _ways_on(request: PlanRequest, candidates: list[Candidate], roomy: list[Candidate], links: Links) -> Ways:
    """From the worker that has prefilled it: to another decode worker, or no further."""
    prefills = [candidate for candidate in candidates if candidate.facts.id == request.prefilled_on]
    tried = {*request.exclude, request.prefilled_on}
    others = [one for one in roomy if one.facts.can_decode and one.facts.id not in tried]
    if any(_is_connected(prefill, others, links) for prefill in prefills):
        return Ways(prefills, [], others, "no room before")
    can_stay = [candidate for candidate in roomy if candidate.facts.id == request.prefilled_on]
    return Ways([], can_stay, [], "no room elsewhere")


def _is_connected(prefill: Candidate, decodes: list[Candidate], links: Links) -> bool:
    return any((prefill.facts.id, decode.facts.id) in links for decode in decodes)
