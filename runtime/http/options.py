"""What an endpoint is told at its start, beside where it listens."""

from __future__ import annotations

import msgspec

from dynrt.runtime.http.answers.formats import AnswerFormats


class EndpointOptions(msgspec.Struct, frozen=True):
    """Who may call, over what, and how answers are read. The defaults serve callers on this machine, in the clear."""

    api_key_file: str | None = None  # one key a line
    api_keys: tuple[str, ...] = ()  # further keys; not logged, not shown
    guard_metrics: bool = True  # /metrics wants a key as well, if there are keys
    allow_unauthenticated: bool = False  # without any key, let other machines in all the same
    cors_origins: tuple[str, ...] = ()  # of web pages that may call; "*": any
    tls_cert: str | None = None  # PEM files; both or none
    tls_key: str | None = None
    answer_formats: AnswerFormats = AnswerFormats()

    @property
    def loopback_only(self) -> bool:
        """Whether only callers on this machine may be let in: there is no key to tell others by."""
        return not (self.api_keys or self.api_key_file or self.allow_unauthenticated)
