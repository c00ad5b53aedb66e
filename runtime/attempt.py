"""One attempt at a request on one plan's workers: what they said about it, waiting to be read."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from dynrt.runtime.errors import DynrtError, EngineError, InvalidRequestError
from dynrt.runtime.handoff_times import HandoffTimes
from dynrt.runtime.messages import StepTiming, Submit, TokenDelta
from dynrt.runtime.passage import Passage
from dynrt.runtime.request_times import StageTimes
from dynrt.transfer.events import FirstToken, HandoffId


class AttemptError(Exception):
    """This attempt is over without a result; another may be made."""

    def __init__(self, reason: str, lost: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lost = lost  # the incarnation that was lost, if that was why


class NoRoomError(AttemptError):
    """Decode had no room for the finished prompt, which waits on its prefill worker to be taken elsewhere."""


class Arrival(msgspec.Struct, frozen=True):
    """A delta, with the worker that sent it."""

    delta: TokenDelta
    incarnation: str
    timing: StepTiming | None


class Attempt:
    """Bounded by max_tokens: a reader that is slow finds what came meanwhile, all at once.

    A decode worker with `first_token_from` "decode" samples the first token itself: then nobody reads prefill's. Its
    tokens may come before prefill has told of its step; they wait for what only that step knows of the prompt.
    """

    def __init__(
        self,
        key: bytes,
        epoch: int,
        prefill: str,
        decode: str,
        chars_sent: int,
        first_token_from: Literal["prefill", "decode"] = "prefill",
        outputs_sent: int = 0,
        passage: Passage | None = None,
        number: int = 0,
    ) -> None:
        self.key = key
        self.number = number  # the runtime's, given to no other attempt
        self.epoch = epoch
        self.id: HandoffId = key, epoch
        self.prefill = prefill  # incarnations; the same for a local plan
        self.decode = decode
        self.is_remote = prefill != decode
        self.chars_sent = chars_sent  # by earlier attempts
        self.outputs_sent = outputs_sent  # tokens, likewise
        self.first_token_from = first_token_from
        self.sampled: FirstToken | None = None  # by prefill, for decode to go on behind
        self.holds: HandoffId | None = None  # a handoff whose pins this local attempt makes use of
        self.pull: Submit | None = None  # for decode, once the prompt is computed, where it fetches the KV
        self.times = HandoffTimes()
        self.stage = StageTimes(prefill, decode)
        self.passage = passage if passage is not None else Passage(0.0)
        self.passage.stages.append(self.stage)
        self._decode_samples = first_token_from == "decode" and self.is_remote
        self._awaits_prefill = self._decode_samples
        self.has_begun = False  # a token has been sampled for it
        self._unread: TokenDelta | None = None  # prefill's, until decode's next takes along what it says
        self._arrivals: list[Arrival] = []
        self._failure: AttemptError | DynrtError | None = None
        self._reader: asyncio.Future[None] | None = None  # who has read everything and waits for more

    @property
    def is_pushed(self) -> bool:
        """Its KV is handed off by our own two ends, of which the ledger keeps account."""
        return self.is_remote and self.pull is None

    def arrive(self, arrival: Arrival) -> int:
        """Returns how many tokens of it the reader will get; none once the attempt has failed."""
        if self._failure is not None:
            return 0
        delta = arrival.delta
        self.has_begun = True
        if self.computes(arrival):
            self.times.computed_at = None if arrival.timing is None else arrival.timing.ended_at
        elif self.times.first_step is None:
            self.times.first_step = arrival.timing
        if delta.finish_reason == "error":
            self.fail(_engines_error(delta))
            return 0
        if self._decode_samples and arrival.incarnation == self.prefill:
            self._unread = delta
            self._prefill_has_told()
            return 0
        if self._awaits_prefill:
            self._arrivals.append(arrival)
        else:
            self._append(arrival)
        return len(delta.token_ids)

    def _prefill_has_told(self) -> None:
        """Or never will: what came before is read from now on."""
        self._awaits_prefill = False
        waiting, self._arrivals = self._arrivals, []
        for arrival in waiting:
            self._append(arrival)

    def _append(self, arrival: Arrival) -> None:
        if self._decode_samples or self._unread is not None:
            arrival = self._about_the_prompt(arrival)
        self._arrivals.append(arrival)
        self._tell()

    def _about_the_prompt(self, arrival: Arrival) -> Arrival:
        """With what only the step that computed the prompt could tell: whoever goes on found it computed."""
        told, self._unread = self._unread, None
        delta = msgspec.structs.replace(
            arrival.delta,
            cached_tokens=told and told.cached_tokens,
            prompt_logprobs=told and told.prompt_logprobs,
        )
        return msgspec.structs.replace(arrival, delta=delta)

    def computes(self, arrival: Arrival) -> bool:
        """Whether it says that the prompt to be handed off is computed."""
        return self.is_remote and arrival.incarnation == self.prefill

    def moved(self, epoch: int, decode: str, number: int) -> Attempt:
        """The same finished prompt on its way to another decode worker."""
        moved = Attempt(
            self.key,
            epoch,
            self.prefill,
            decode,
            self.chars_sent,
            self.first_token_from,
            self.outputs_sent,
            self.passage,
            number,
        )
        moved.sampled = self.sampled and msgspec.structs.replace(self.sampled, epoch=epoch)
        moved.has_begun = True
        return moved

    def inherit(self, held: Attempt) -> None:
        """What was said of the prompt by the attempt that computed it, and that nobody has read yet."""
        self._unread = held._unread
        self._awaits_prefill = self._decode_samples and held._awaits_prefill

    def first_token(self, arrival: Arrival) -> FirstToken | None:
        """What decode must know of this arrival: the one token from prefill, if the request goes on behind it."""
        delta = arrival.delta
        if self._decode_samples or not self.computes(arrival) or delta.finish_reason is not None:
            return None
        assert len(delta.token_ids) == 1, "prefill samples exactly one token"
        chars_sent = self.chars_sent + delta.num_chars
        self.sampled = FirstToken(self.key, self.epoch, delta.token_ids[0], chars_sent)
        return self.sampled

    def pull_behind(self, arrival: Arrival) -> Submit | None:
        """What decode must be told of this arrival, if it is prefill's: where the KV of the prompt waits."""
        if self.pull is None or not self.computes(arrival) or self._failure is not None:
            return None
        return msgspec.structs.replace(self.pull, kv_transfer_params=arrival.delta.kv_transfer_params)

    def was_pulled(self, arrival: Arrival) -> bool | None:
        """Of decode's first arrival: whether it found all KV but the last token's; None for any other."""
        found = arrival.delta.cached_tokens
        if self.pull is None or self.computes(arrival) or found is None:
            return None
        return found >= (len(self.pull.prompt_ids) + len(self.pull.output_ids)) // 4 - 1

    def fail(self, failure: AttemptError | DynrtError) -> None:
        """Read after everything that arrived before."""
        if self._failure is None:
            self._failure = failure
            if self._awaits_prefill:
                self._prefill_has_told()
        self._tell()

    def _tell(self) -> None:
        """What is there to be read comes before what may pass."""
        self.passage.close()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def no_room(self, reason: str) -> None:
        """Decode was told to forget it. Should it have begun all the same, only a new attempt knows from where."""
        has_begun = self.times.first_step is not None
        self.fail(AttemptError(reason) if has_begun else NoRoomError(reason))

    def worker_lost(self, incarnation: str, reason: str) -> None:
        if incarnation == self.decode:
            self.fail(AttemptError(f"its decode worker was lost: {reason}", incarnation))
        elif incarnation == self.prefill and (not self.has_begun or self._is_pulling):
            self.fail(AttemptError(f"its prefill worker was lost: {reason}", incarnation))
        elif incarnation == self.prefill and self._awaits_prefill:
            self._prefill_has_told()
        # A prefill worker lost later: the decode end knows whether it had everything, and says so.

    @property
    def _is_pulling(self) -> bool:
        """Decode may wait for KV that nobody but a living prefill worker gives."""
        return self.pull is not None and self.times.first_step is None

    async def read(self) -> list[Arrival]:
        """Everything that arrived since the last read, at least one. Raises what the attempt failed with.

        Once decode has begun, what need not be read passes while nothing else waits.
        """
        if self._failure is None and (not self._arrivals or self._awaits_prefill):
            if self.times.first_step is not None and not self._arrivals:
                self.passage.open()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
                self.passage.close()
        if not self._arrivals:
            assert self._failure is not None, "news without arrival or failure"
            raise self._failure
        arrivals, self._arrivals = self._arrivals, []
        return arrivals


def _engines_error(delta: TokenDelta) -> DynrtError:
    message = delta.error or "the engine failed"
    return InvalidRequestError(message) if delta.is_refusal else EngineError(message)
