"""A model that computes nothing but remembers what every KV slot should contain, around a real scheduler.

The KV of a token depends on all tokens before it; here it *is* those tokens. A slot that was overwritten, evicted
too early or received for another prompt is seen at the first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from dynrt.engines.protocol import EngineRequest, Token
from dynrt.engines.scheduling.batch import Chunk, SampleSpec
from dynrt.engines.scheduling.block_pool import BlockPool
from dynrt.engines.scheduling.limits import SchedulerLimits
from dynrt.engines.scheduling.logit_changes import LogitChanges
from dynrt.engines.scheduling.scheduler import Batch, Scheduler
from dynrt.engines.scheduling.sequence import Sequence as RunningSequence
from dynrt.runtime.messages import FinishReason, TokenLogprob
from dynrt.transfer.local import BlocksReady

VOCAB = 12
EOS = frozenset({0})
Prefix = tuple[str, tuple[int, ...]]  # salt, and all tokens up to and including the slot's own
Outcome = tuple[list[int], FinishReason, int | None]


def next_token(token_ids: Sequence[int], banned_ids: Sequence[int] = ()) -> int:
    """A fixed function of all tokens so far, as greedy sampling is."""
    token_id = crc32(bytes(token_ids)) % VOCAB
    while token_id in banned_ids:
        token_id = (token_id + 1) % VOCAB
    return token_id


def finish_of(request: EngineRequest, outputs: Sequence[int]) -> tuple[FinishReason | None, int | None]:
    """The protocol's rules, written a second time."""
    sampling, last = request.sampling, outputs[-1]
    if last in EOS and not sampling.ignore_eos:
        return "stop", None
    if last in sampling.stop_token_ids:
        return "stop", last
    return ("length", None) if len(outputs) == sampling.max_tokens else (None, None)


def expected_outcome(request: EngineRequest) -> Outcome:
    """All output tokens, those given with the request included, and how the request ends."""
    outputs = list(request.output_ids)
    ending = set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else EOS)
    while True:
        banned_ids = tuple(ending) if len(outputs) < request.sampling.min_tokens else ()
        outputs.append(next_token([*request.prompt_ids, *outputs], banned_ids))
        finish_reason, stop_reason = finish_of(request, outputs)
        if finish_reason is not None:
            return outputs, finish_reason, stop_reason


def expected_kv(request: EngineRequest) -> list[Prefix]:
    """What the slots of the whole prompt contain."""
    token_ids = [*request.prompt_ids, *request.output_ids]
    return [(request.salt, tuple(token_ids[: i + 1])) for i in range(len(token_ids))]


def changes_of(changes: LogitChanges | None) -> set[tuple[float, ...]]:
    if changes is None:
        return set()
    return {*zip(changes.token_ids, changes.biases, changes.divisors, changes.deductions, strict=True)}


def expected_changes(request: EngineRequest, token_ids: Sequence[int]) -> set[tuple[float, ...]]:
    """Of a sequence that is looked at for the first time."""
    changes = LogitChanges.of(request.sampling, request.prompt_ids)
    if changes is not None:
        changes.follow(token_ids, len(request.prompt_ids))
    return changes_of(changes)


class FakeKvEngine:
    """A scheduler, a pool, and KV slots that are checked at every read."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        max_batch_tokens: int = 16,
        max_batch_requests: int = 8,
        context_length: int = 256,
    ) -> None:
        limits = SchedulerLimits(context_length, VOCAB, EOS, max_batch_tokens, max_batch_requests)
        self.limits = limits
        self.pool = BlockPool(num_blocks, block_size)
        self.now = 0.0  # counts steps
        self.scheduler = Scheduler(limits, self.pool)
        self.slots: dict[tuple[int, int], Prefix] = {}  # (block id, offset)
        self.pinned: dict[tuple[bytes, int], list[BlocksReady]] = {}
        self.prefills: dict[tuple[bytes, int], EngineRequest] = {}

    def submit(self, request: EngineRequest) -> None:
        if request.prefill_only:
            self.prefills[request.key, request.epoch] = request
        self.scheduler.submit(request)

    def release(self, key: bytes, epoch: int) -> None:
        self.pinned.pop((key, epoch), None)
        self.scheduler.release(key, epoch)

    def receive(self, request: EngineRequest, first_block: int, block_ids: Sequence[int]) -> None:
        """Fill a reservation as a handoff does."""
        expected = expected_kv(request)
        for position in range(first_block * self.pool.block_size, len(expected)):
            index, offset = divmod(position, self.pool.block_size)
            self.slots[block_ids[index - first_block], offset] = expected[position]

    def step(self) -> list[Token]:
        """One whole step, everything checked that can be."""
        had_work, preemptions = self.scheduler.has_work(), self.scheduler.load().preemptions_total
        tokens = self.scheduler.take_refused()
        self.now += 1.0
        batch = self.scheduler.schedule(self.now)
        preempted = self.scheduler.load().preemptions_total > preemptions
        assert had_work == bool(tokens or batch.chunks or preempted)
        self.check_size(batch)
        self.take_announcements(batch)
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True):
            self.write(sequence.request, sequence.token_ids, chunk)
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True):
            self.check_read(sequence.request, sequence.token_ids, chunk)
        sampled = [
            self.sample(sequence.token_ids, chunk.sample)
            for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True)
            if chunk.sample is not None
        ]
        self.check_pinned()
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True):
            self.score(sequence, chunk)
        return tokens + self.scheduler.advance(batch, sampled)

    def fail_step(self) -> list[Token]:
        """A step that breaks off after it has written nonsense."""
        batch = self.scheduler.schedule(0.0)
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True):
            self.pinned.pop(sequence.id, None)
            for position in range(chunk.start, chunk.end):
                self.slots[self.slot_of(chunk, position)] = ("nonsense", ())
        self.check_pinned()
        return self.scheduler.fail(batch, "out of memory")

    def sample(self, token_ids: list[int], spec: SampleSpec) -> int:
        return next_token(token_ids, spec.banned_ids)

    def score(self, sequence: RunningSequence, chunk: Chunk) -> None:
        """Prompt tokens are scored once each, in order, by the token before them."""
        if chunk.score is None:
            return
        known, prompt_ids = sequence.prompt_logprobs, sequence.request.prompt_ids
        assert known is not None and sequence.request.sampling.prompt_logprobs == chunk.score.num_top
        assert chunk.start + chunk.score.first_row == len(known) - 1
        assert chunk.score.target_ids == list(
            prompt_ids[len(known) : len(known) + len(chunk.score.target_ids)]
        )
        assert len(known) - 1 + len(chunk.score.target_ids) <= chunk.end
        known += [TokenLogprob(token_id, 0.0) for token_id in chunk.score.target_ids]

    def check_size(self, batch: Batch) -> None:
        assert batch.num_tokens == sum(len(chunk.token_ids) for chunk in batch.chunks)
        assert batch.num_tokens <= self.limits.max_batch_tokens
        assert len(batch.chunks) <= self.limits.max_batch_requests
        assert all(chunk.token_ids for chunk in batch.chunks)

    def take_announcements(self, batch: Batch) -> None:
        """Prompt blocks are announced once, in order, and those called written are."""
        for ready in batch.ready:
            before = self.pinned.setdefault((ready.key, ready.epoch), [])
            assert ready.first_block == sum(len(earlier.block_ids) for earlier in before)
            before.append(ready)
            if ready.written:
                self.check_announced(ready)

    def check_pinned(self) -> None:
        for announced in self.pinned.values():
            for ready in announced:
                self.check_announced(ready)

    def check_announced(self, ready: BlocksReady) -> None:
        expected = expected_kv(self.prefills[ready.key, ready.epoch])
        block_size = self.pool.block_size
        assert ready.num_prompt_tokens == len(expected)
        for index, block_id in enumerate(ready.block_ids, ready.first_block):
            for offset, prefix in enumerate(expected[index * block_size : (index + 1) * block_size]):
                assert self.slots[block_id, offset] == prefix, f"announced block {block_id} is wrong"

    def write(self, request: EngineRequest, token_ids: list[int], chunk: Chunk) -> None:
        assert chunk.token_ids == token_ids[chunk.start : chunk.end]
        for position in range(chunk.start, chunk.end):
            self.slots[self.slot_of(chunk, position)] = request.salt, tuple(token_ids[: position + 1])

    def check_read(self, request: EngineRequest, token_ids: list[int], chunk: Chunk) -> None:
        for position in range(chunk.end):
            expected = request.salt, tuple(token_ids[: position + 1])
            assert self.slots.get(self.slot_of(chunk, position)) == expected, f"wrong KV at {position}"
        if chunk.sample is not None:
            assert chunk.end == len(token_ids)
            assert chunk.sample.position == len(token_ids) - len(request.prompt_ids)
            assert changes_of(chunk.sample.changes) == expected_changes(request, token_ids)

    def slot_of(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.block_ids[position // self.pool.block_size], position % self.pool.block_size
