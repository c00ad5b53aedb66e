"""The ways to serve one request, each with its cost, and the search for the best of them (sans-IO).

A score is a part of the prefill worker's, a part of the decode worker's, and the exposed transfer between them.
Only the last needs the pair: sorted by their own parts, most pairs are ruled out without being looked at.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter

import msgspec

from dynrt.planner.coefficients import Coefficients
from dynrt.planner.cost import DECODE_HORIZON, EQUAL_WITHIN, Terms, exposed_transfer_ms
from dynrt.planner.links import Links
from dynrt.planner.load import Load
from dynrt.planner.plan import Choice, WorkerFacts

BY_LOCAL_SCORE = attrgetter("local_score_ms")
BY_PREFILL_SCORE = attrgetter("prefill_score_ms")
BY_DECODE_AND_LOT = attrgetter("decode_ms", "lot")
BY_SCORE = attrgetter("score_ms")


class Demand(msgspec.Struct, frozen=True):
    """What all candidates of one request have in common."""

    prompt_tokens: int
    output_tokens: int
    uncached_extra: float  # k of the score


class Candidate(msgspec.Struct, frozen=True):
    """One worker as seen by one request: what each part it could play would cost there."""

    facts: WorkerFacts
    hit_tokens: int
    prefill_hit_tokens: int  # the hit without the last token: that one is always computed
    queue_ms: float
    compute_ms: float
    extra_ms: float  # of the score as the one that prefills: k · uncached time, and a lot to break ties
    batch_ms: float
    interruption_ms: float  # what a prefill here costs the requests that decode here
    waiting_requests: int  # for their first token
    lot: float  # drawn for this request: breaks ties between decode workers
    prefill_score_ms: float  # its part of a score as the one that prefills
    local_score_ms: float  # the score of doing it all here
    decode_ms: float  # its part of a score as the one that decodes what was prefilled elsewhere

    @property
    def first_token_ms(self) -> float:
        """Prefill samples the first token, and it goes to the client at once: nothing later delays it."""
        return self.queue_ms + self.compute_ms

    def local_choice(self) -> Choice:
        """Prefill and decode here."""
        decode_ms = self.batch_ms + self.interruption_ms
        terms = Terms(self.queue_ms, self.compute_ms, 0.0, 0.0, decode_ms)
        expected_ms = self.queue_ms + self.compute_ms + decode_ms
        name, hit_tokens = self.facts.id, self.prefill_hit_tokens
        score_ms = expected_ms + self.extra_ms
        return Choice("local", name, name, hit_tokens, hit_tokens, terms, expected_ms, score_ms)


class _Found(msgspec.Struct, frozen=True):
    """A pair that was looked at."""

    score_ms: float  # without the handoff's fixed cost, the same for all
    exposed_ms: float
    prefill: Candidate
    decode: Candidate


def see_worker(
    facts: WorkerFacts,
    load: Load,
    coefficients: Coefficients,
    demand: Demand,
    hit_tokens: int,
    lot: float,
) -> Candidate:
    """Price a worker for a prompt of which it holds `hit_tokens`; `lot` is drawn from [0, 1).

    The formulas are those of docs/planner.md, in one piece because every plan prices every worker.
    """
    prompt_tokens = demand.prompt_tokens
    last_block_start = (prompt_tokens - 1) // facts.block_size * facts.block_size
    cached_tokens = hit_tokens if hit_tokens < last_block_start else last_block_start
    uncached_tokens = prompt_tokens - cached_tokens
    step_ms, token_ms = coefficients.step_ms, coefficients.prefill_token_ms
    context_ms = coefficients.prefill_context_ms

    uncached_context = uncached_tokens * (prompt_tokens + cached_tokens)  # n² - p²
    uncached_ms = token_ms * uncached_tokens + context_ms * uncached_context
    compute_ms = step_ms + uncached_ms

    tokens_ms = token_ms * load.prefill_tokens
    queue_ms = step_ms * load.prefill_requests + tokens_ms + context_ms * load.prefill_context
    missing_tokens = load.held_tokens + uncached_tokens - facts.capacity_tokens
    if missing_tokens > 0:  # what must be preempted to make room will be computed again
        queue_ms += token_ms * missing_tokens

    requests = load.decode_requests
    request_ms, kv_token_ms = coefficients.decode_request_ms, coefficients.decode_kv_token_ms
    its_delay_ms = request_ms * requests + kv_token_ms * load.decode_kv_tokens  # at each of its steps
    their_delay_ms = requests * (request_ms + kv_token_ms * prompt_tokens)
    batch_ms = min(demand.output_tokens, DECODE_HORIZON) * (its_delay_ms + their_delay_ms)
    interruption_ms = uncached_ms * requests

    extra_ms = demand.uncached_extra * uncached_ms
    extra_ms += EQUAL_WITHIN * lot * (queue_ms + compute_ms + extra_ms)
    score_ms = queue_ms + compute_ms + extra_ms
    return Candidate(
        facts,
        hit_tokens,
        cached_tokens,
        queue_ms,
        compute_ms,
        extra_ms,
        batch_ms,
        interruption_ms,
        load.prefill_requests,
        lot,
        prefill_score_ms=score_ms,
        local_score_ms=score_ms + batch_ms + interruption_ms,
        decode_ms=batch_ms + queue_ms,
    )


def best_local(candidates: list[Candidate]) -> list[Choice]:
    """The two best, the best first."""
    best = sorted(candidates, key=BY_LOCAL_SCORE)[:2]
    return [candidate.local_choice() for candidate in best]


def best_remote(
    prefills: list[Candidate], decodes: list[Candidate], links: Links, prompt_tokens: int
) -> list[Choice]:
    """The two best pairs, the best first; among equal decode workers the lot decides."""
    if not prefills or not decodes:
        return []
    decodes = sorted(decodes, key=BY_DECODE_AND_LOT)
    longest_hit, fastest = max(candidate.hit_tokens for candidate in decodes), links.fastest
    best: list[_Found] = []
    bound_ms = inf  # only a lower score counts
    for prefill in sorted(prefills, key=BY_PREFILL_SCORE):
        prefill_ms = prefill.prefill_score_ms
        least_ms = prefill_ms + transfer_ms(prefill, longest_hit, prompt_tokens, fastest)
        if least_ms + decodes[0].decode_ms >= bound_ms:
            continue
        for decode in decodes:
            decode_ms = decode.decode_ms
            if least_ms + decode_ms >= bound_ms:
                break  # decode workers further on cost still more
            pair = prefill.facts.id, decode.facts.id
            if pair not in links:
                continue
            exposed_ms = transfer_ms(prefill, decode.hit_tokens, prompt_tokens, links.rate(pair))
            score_ms = prefill_ms + exposed_ms + decode_ms
            if score_ms < bound_ms:
                best = sorted([*best, _Found(score_ms, exposed_ms, prefill, decode)], key=BY_SCORE)[:2]
                bound_ms = best[1].score_ms if len(best) == 2 else inf
    return [_remote_choice(found, links.handoff_ms) for found in best]


def transfer_ms(prefill: Candidate, decode_hit_tokens: int, prompt_tokens: int, bytes_per_ms: float) -> float:
    """Exposed time of pushing what the decode worker does not hold."""
    held_tokens = max(prefill.prefill_hit_tokens, decode_hit_tokens)
    fresh_bytes = prefill.facts.kv_bytes_per_token * (prompt_tokens - held_tokens)
    cached_bytes = prefill.facts.kv_bytes_per_token * (held_tokens - decode_hit_tokens)
    return exposed_transfer_ms(
        prefill.compute_ms, prefill.facts.num_layers, fresh_bytes, cached_bytes, bytes_per_ms
    )


def _remote_choice(found: _Found, handoff_ms: float) -> Choice:
    prefill, decode = found.prefill, found.decode
    terms = Terms(prefill.queue_ms, prefill.compute_ms, found.exposed_ms, handoff_ms, decode.decode_ms)
    expected_ms = terms.expected_ms
    return Choice(
        "remote",
        prefill.facts.id,
        decode.facts.id,
        prefill.prefill_hit_tokens,
        decode.hit_tokens,
        terms,
        expected_ms,
        expected_ms + prefill.extra_ms,
    )
