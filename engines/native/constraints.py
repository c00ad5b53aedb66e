"""The grammars of the requests that run on one engine."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec

from dynrt.engines.native.grammar import GrammarCompiler, GrammarMatcher
from dynrt.engines.protocol import EngineInfo, EngineRequest
from dynrt.engines.scheduling.scheduler import Batch
from dynrt.engines.scheduling.sequence import RequestId, Sequence


class Allowed(msgspec.Struct, frozen=True):
    """What grammars say of one step."""

    bits: dict[int, bytes] = {}  # by row of the logits, see GrammarMatcher.allowed
    errors: dict[RequestId, str] = {}  # requests whose grammar cannot be followed any further


class Constraints:
    """A matcher for each running sequence with a grammar, for as long as the scheduler keeps the sequence.

    A matcher that is made late catches up with the output, so a request may come with some of it.
    """

    def __init__(self, model_dir: str, info: EngineInfo) -> None:
        self._model_dir = model_dir
        self._info = info
        self._matchers: WeakKeyDictionary[Sequence, GrammarMatcher] = WeakKeyDictionary()

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError for a grammar that cannot be obeyed."""
        if request.sampling.grammar is not None:
            self._compiler.matcher(request.sampling.grammar)

    def allowed(self, batch: Batch) -> Allowed:
        """In this batch's rows to be sampled. On CUDA, the model computes meanwhile."""
        allowed = Allowed()
        pairs = zip(batch.sequences, batch.chunks, strict=True)
        sampled = [(sequence, chunk.sample) for sequence, chunk in pairs if chunk.sample is not None]
        for row, (sequence, spec) in enumerate(sampled):
            if spec.params.grammar is None:
                continue
            matcher = self._followed(sequence)
            bits = matcher.allowed(spec.banned_ids)
            error = matcher.find_error()
            if error is None:
                allowed.bits[row] = bits
            else:
                allowed.errors[sequence.id] = error
        return allowed

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """Made with the first grammar: 0.3 s and 34 MB for 49,152 tokens, which most workers never need."""
        tokenizer_file = str(Path(self._model_dir) / "tokenizer.json")
        return GrammarCompiler(tokenizer_file, self._info.vocab_size, self._info.eos_token_ids)

    def _followed(self, sequence: Sequence) -> GrammarMatcher:
        """Up to the sequence's last known token."""
        matcher = self._matchers.get(sequence)
        if matcher is None:
            grammar = sequence.request.sampling.grammar
            assert grammar is not None, f"{sequence.id} has no grammar"
            self._matchers[sequence] = matcher = self._compiler.matcher(grammar)
        matcher.follow(sequence.token_ids[len(sequence.request.prompt_ids) :])
        return matcher
