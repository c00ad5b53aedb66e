"""Which tokens are computed in the next step, and in which blocks (sans-IO).

Decodes come first, then prompts already begun, then new requests in the order of their arrival. A request is
admitted once blocks for all its known tokens are there, so only decoding can run out of blocks; then the youngest
running request gives its blocks back and is computed again later.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from dynrt.engines.protocol import EngineRequest, Reservation, Token
from dynrt.engines.scheduling.batch import Chunk
from dynrt.engines.scheduling.block_pool import BlockPool
from dynrt.engines.scheduling.limits import SchedulerLimits, find_refusal
from dynrt.engines.scheduling.sequence import RequestId, Sequence
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.messages import EngineLoad, TokenLogprob
from dynrt.transfer.local import BlocksReady

NO_TOKEN = -1  # the token_id of a Token that carries an error


class Batch(msgspec.Struct):
    """One step's work: `chunks[i]` belongs to `sequences[i]`; `ready` are the handoff blocks that it completes."""

    chunks: list[Chunk] = []
    sequences: list[Sequence] = []
    ready: list[BlocksReady] = []
    num_tokens: int = 0


class Scheduler:
    """Takes requests and sampled tokens, gives batches and the requests' tokens.

    Call `schedule`, compute, then `advance` (or `fail`) with that batch before anything else. Requests are known
    by (key, epoch).
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        assert limits.max_batch_tokens > 0 and limits.max_batch_requests > 0, limits
        self._limits = limits
        self._pool = pool
        self._waiting: OrderedDict[RequestId, Sequence] = OrderedDict()
        self._running: dict[RequestId, Sequence] = {}  # oldest first
        self._reserved: dict[RequestId, Sequence] = {}
        self._pinned: dict[RequestId, list[int]] = {}  # announced for a handoff, held until `release`
        self._refused: dict[RequestId, str] = {}  # why they can never run
        self._num_preemptions = 0

    # --- requests -------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; one that can never run ends with an error Token (see `take_refused`)."""
        sequence = Sequence.of(request)
        assert sequence.id not in self._waiting and sequence.id not in self._running, (
            f"{sequence.id} runs here"
        )
        refusal = find_refusal(request, self._limits, self._pool)
        if refusal is None:
            self._waiting[sequence.id] = sequence
        else:
            self.refuse(request, refusal)

    def refuse(self, request: EngineRequest, reason: str) -> None:
        """End a request that was not submitted with an error Token."""
        self._refused[request.key, request.epoch] = reason

    def cancel(self, key: bytes, epoch: int) -> None:
        """Forget a request. Its pinned blocks stay pinned, a reservation stays reserved."""
        self._waiting.pop((key, epoch), None)
        self._refused.pop((key, epoch), None)
        if (key, epoch) in self._running:
            self._pool.release(self._running.pop((key, epoch)).block_ids)

    def reserve(self, request: EngineRequest) -> Reservation | None:
        """Hold blocks for all of `prompt_ids` and `output_ids`, own prefix hit included; None: no room now.

        Raises InvalidRequestError if the request can never run here.
        """
        sequence = Sequence.of(request)
        assert sequence.id not in self._reserved, f"{sequence.id} is reserved already"
        refusal = find_refusal(request, self._limits, self._pool)
        if refusal is not None:
            raise InvalidRequestError(refusal)
        hit = self._pool.lookup(sequence.token_ids, sequence.salt)
        if self._blocks_needed(sequence, hit) > self._pool.num_available - self._count_promised():
            return None
        self._occupy(sequence, hit)
        self._reserved[sequence.id] = sequence
        return Reservation(len(hit), sequence.block_ids[len(hit) :])

    def commit(self, key: bytes, epoch: int, first_token: int) -> None:
        """The reserved blocks are filled: go on behind `first_token`, which did not end the request."""
        sequence = self._reserved.pop((key, epoch))
        sequence.num_computed = len(sequence.token_ids)
        self._store_full_blocks(sequence)
        sequence.token_ids.append(first_token)
        sequence.num_given = len(sequence.token_ids)
        sequence.prompt_logprobs = None  # they came with the first token
        max_tokens = sequence.request.sampling.max_tokens
        assert sequence.num_outputs < max_tokens, (
            f"first token is output {sequence.num_outputs} of {max_tokens}"
        )
        self._running[sequence.id] = sequence

    def release(self, key: bytes, epoch: int) -> None:
        """Give a reservation back, or unpin the blocks announced for a handoff."""
        if (key, epoch) in self._reserved:
            self._pool.release(self._reserved.pop((key, epoch)).block_ids)
        self._pool.release(self._pinned.pop((key, epoch), []))

    # --- steps ----------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a step would do anything. False while all that waits needs a release, commit or cancel first."""
        return bool(self._running or self._refused) or self._find_admissible() is not None

    def take_refused(self) -> list[Token]:
        """The errors of requests that were submitted since the last call and can never run."""
        refused, self._refused = self._refused, {}
        return [_error_token(request_id, error, is_refusal=True) for request_id, error in refused.items()]

    def schedule(self, now: float) -> Batch:
        """The work of the step that begins at `now`; empty if nothing can be computed."""
        batch = Batch()
        decodes = [sequence for sequence in self._running.values() if sequence.num_uncomputed == 1]
        prefills = [sequence for sequence in self._running.values() if sequence.num_uncomputed > 1]
        for sequence in decodes:
            if self._has_room(batch) and self._grow(sequence):
                self._add(batch, sequence)
        for sequence in prefills:
            if self._has_room(batch) and sequence.id in self._running:
                self._add(batch, sequence)
        while self._has_room(batch) and (found := self._find_admissible()):
            self._admit(*found, now)
            self._add(batch, found[0])
        return batch

    def count_uneventful(self) -> int:
        """How many steps from now on would only add a token to each request of the batch, unless one ends it.

        In these steps no request is admitted, ends, gives its first token, or fills or needs a block.
        """
        if self._refused or any(sequence.num_uncomputed != 1 for sequence in self._running.values()):
            return 0
        if self._find_admissible() is not None:
            return 0
        steps = (sequence.count_uneventful(self._pool.block_size) for sequence in self._next_decodes())
        return min(steps, default=0)

    def decode_work(self) -> tuple[int, int]:
        """Requests of the next uneventful step, and the tokens of KV that they attend to."""
        sequences = self._next_decodes()
        return len(sequences), sum(sequence.num_computed + 1 for sequence in sequences)

    def skip(self, count: int, token_id: int) -> None:
        """Do what `count` uneventful steps would that sample `token_id` each time."""
        for sequence in self._next_decodes():
            sequence.token_ids += [token_id] * count
            sequence.num_computed += count

    def advance(
        self,
        batch: Batch,
        sampled: list[int],
        logprobs: list[TokenLogprob | None] | None = None,
        errors: Mapping[RequestId, str] = MappingProxyType({}),
    ) -> list[Token]:
        """The batch is computed; `sampled` has one token for each chunk with `sample`, in order, as has `logprobs`.

        Of requests in `errors` the KV is right, but the token means nothing: they end. Prompt tokens that a chunk's
        `score` asks for are in their sequence's `prompt_logprobs`.
        """
        next_sampled = iter(sampled)
        next_logprob = itertools.repeat(None) if logprobs is None else iter(logprobs)
        tokens: list[Token] = []
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True):
            sequence.num_computed = chunk.end
            self._store_full_blocks(sequence)
            if chunk.sample is None:
                continue
            token = self._append(sequence, next(next_sampled), next(next_logprob), errors.get(sequence.id))
            tokens.append(token)
        assert next(next_sampled, None) is None, f"{len(sampled)} tokens for {len(tokens)} requests"
        return tokens

    def fail(self, batch: Batch, error: str) -> list[Token]:
        """The batch could not be computed: end its requests. Pinned blocks stay pinned."""
        for sequence in batch.sequences:
            self._leave(sequence)
        return [_error_token(sequence.id, error) for sequence in batch.sequences]

    def load(self) -> EngineLoad:
        return EngineLoad(
            waiting_requests=len(self._waiting),
            running_requests=len(self._running),
            blocks_total=self._pool.num_blocks,
            blocks_active=self._pool.num_active,
            blocks_cached=self._pool.num_cached,
            preemptions_total=self._num_preemptions,
        )

    # --- room -----------------------------------------------------------------------------------------

    def _blocks_needed(self, sequence: Sequence, hit: list[int]) -> int:
        """How many available blocks `_occupy` takes, unused ones of the hit included."""
        return self._pool.blocks_for(len(sequence.token_ids)) - len(hit) + self._pool.count_unused(hit)

    def _count_growing(self) -> int:
        """One block for each running request to grow into, lest what comes in now is preempted at once."""
        return sum(not sequence.request.prefill_only for sequence in self._running.values())

    def _count_promised(self) -> int:
        """Blocks that a reservation must leave to others: to growth, and to the request that waits longest."""
        head = next(iter(self._waiting.values()), None)
        needed = 0 if head is None else self._blocks_needed(head, self._find_hit(head))
        return self._count_growing() + needed

    def _find_hit(self, sequence: Sequence) -> list[int]:
        """The cached prefix of a request to be computed here, as far as it need not be; the last token always is."""
        return self._pool.lookup(sequence.token_ids[: sequence.num_skippable], sequence.salt)

    def _find_admissible(self) -> tuple[Sequence, list[int]] | None:
        """The request that waits longest and its prefix hit, if it can run now."""
        if not self._waiting or len(self._running) >= self._limits.max_batch_requests:
            return None
        head = next(iter(self._waiting.values()))
        hit = self._find_hit(head)
        if self._blocks_needed(head, hit) > self._pool.num_available - self._count_growing():
            return None
        return head, hit

    def _admit(self, sequence: Sequence, hit: list[int], now: float) -> None:
        del self._waiting[sequence.id]
        self._occupy(sequence, hit)
        if sequence.admitted_at is None:
            sequence.admitted_at = now
        self._running[sequence.id] = sequence

    def _occupy(self, sequence: Sequence, hit: list[int]) -> None:
        """Hold blocks for all known tokens, `hit` for the first of them."""
        self._pool.acquire(hit)
        num_blocks = self._pool.blocks_for(len(sequence.token_ids))
        sequence.block_ids = hit + self._pool.allocate(num_blocks - len(hit))
        sequence.num_stored = len(hit)
        sequence.num_computed = len(hit) * self._pool.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed

    def _next_decodes(self) -> list[Sequence]:
        """The requests of the next step's batch, while all that run are decoding."""
        limits = self._limits
        count = min(limits.max_batch_tokens, limits.max_batch_requests)
        return [*itertools.islice(self._running.values(), count)]

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token; False if that cost this request itself its place."""
        while sequence.id in self._running:
            if len(sequence.block_ids) * self._pool.block_size > sequence.num_computed:
                return True
            if self._pool.num_available:
                sequence.block_ids += self._pool.allocate(1)
            else:
                self._preempt_youngest()
        return False

    def _preempt_youngest(self) -> None:
        request_id, youngest = self._running.popitem()
        self._pool.release(youngest.reset())
        self._waiting[request_id] = youngest
        self._waiting.move_to_end(request_id, last=False)
        self._num_preemptions += 1

    # --- one sequence's part in a step ----------------------------------------------------------------

    def _has_room(self, batch: Batch) -> bool:
        limits = self._limits
        return batch.num_tokens < limits.max_batch_tokens and len(batch.chunks) < limits.max_batch_requests

    def _add(self, batch: Batch, sequence: Sequence) -> None:
        budget = self._limits.max_batch_tokens - batch.num_tokens
        chunk = sequence.next_chunk(budget, self._limits.eos_token_ids)
        batch.chunks.append(chunk)
        batch.sequences.append(sequence)
        batch.num_tokens += len(chunk.token_ids)
        if sequence.request.prefill_only:
            self._announce(batch, sequence, chunk)

    def _announce(self, batch: Batch, sequence: Sequence, chunk: Chunk) -> None:
        """Pin and tell the blocks that are written already, then those that `chunk` completes."""
        is_over = sequence.num_announced > 0 and sequence.id not in self._pinned
        if is_over:  # released in mid-prompt: pins of later blocks alone would not hold their ancestors
            return
        num_completed = len(sequence.block_ids) if chunk.sample else chunk.end // self._pool.block_size
        for num_ready, written in ((sequence.num_stored, True), (num_completed, False)):
            first_block = sequence.num_announced
            block_ids = sequence.block_ids[first_block:num_ready]
            if block_ids:
                self._pool.acquire(block_ids)
                self._pinned.setdefault(sequence.id, []).extend(block_ids)
                num_tokens = len(sequence.token_ids)
                batch.ready.append(BlocksReady(*sequence.id, first_block, block_ids, written, num_tokens))
                sequence.num_announced = num_ready

    def _store_full_blocks(self, sequence: Sequence) -> None:
        """Put the blocks that became full into the prefix cache."""
        first, end = sequence.num_stored, sequence.num_computed // self._pool.block_size
        if first == end:
            return
        computed = sequence.block_ids[first:end]
        token_ids = sequence.token_ids[first * self._pool.block_size : end * self._pool.block_size]
        parent_id = sequence.block_ids[first - 1] if first else None
        stored = self._pool.store(computed, token_ids, parent_id, sequence.salt)
        sequence.block_ids[first:end] = stored
        sequence.num_stored = end
        if sequence.id in self._pinned:  # exchanged blocks are ancestors of blocks that get pinned later
            exchanged = [new for old, new in zip(computed, stored, strict=True) if old != new]
            self._pool.acquire(exchanged)
            self._pinned[sequence.id] += exchanged

    def _append(
        self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, error: str | None
    ) -> Token:
        if error is not None:
            self._leave(sequence)
            return _error_token(sequence.id, error)
        is_first = len(sequence.token_ids) == sequence.num_given
        sequence.token_ids.append(token_id)
        finish_reason, stop_reason = sequence.finish_of(token_id, self._limits.eos_token_ids)
        if finish_reason is not None or sequence.request.prefill_only:
            self._leave(sequence)
        cached_tokens = sequence.cached_tokens if is_first else None
        return Token(
            *sequence.id,
            token_id,
            finish_reason,
            stop_reason,
            cached_tokens,
            logprob=logprob,
            prompt_logprobs=sequence.take_prompt_logprobs(),
            admitted_at=sequence.admitted_at if is_first else None,
        )

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        self._pool.release(sequence.block_ids)


def _error_token(request_id: RequestId, error: str, is_refusal: bool = False) -> Token:
    return Token(*request_id, NO_TOKEN, finish_reason="error", error=error, is_refusal=is_refusal)
