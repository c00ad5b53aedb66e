"""The API keys that a server takes, and whether a request brings one; compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from multidict import CIMultiDictProxy

from dynrt.runtime.errors import AuthenticationError, ConfigError

BEARER = "bearer "


class ApiKeys:
    """Keys from a file and beside it; only their digests are kept. `reload` reads the file again."""

    def __init__(self, file: Path | None, further: Iterable[str]) -> None:
        self._file = file
        self._further = frozenset(map(_digest, further))
        self._digests: frozenset[bytes] = frozenset()
        self.reload()

    def reload(self) -> None:
        """Raises ConfigError, and keeps the keys it had, if the file cannot be read or has no key."""
        read = frozenset() if self._file is None else frozenset(map(_digest, read_keys(self._file)))
        self._digests = self._further | read

    def check(self, headers: CIMultiDictProxy[str]) -> None:
        """Raises AuthenticationError unless a key of ours comes as a Bearer token or as x-api-key."""
        key = _key_of(headers)
        if not key:
            raise AuthenticationError(
                "this server wants an API key; send one as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )
        digest = _digest(key)
        # All are compared, and in full: how long this takes tells nothing about any of them.
        if not sum(hmac.compare_digest(digest, one) for one in self._digests):
            raise AuthenticationError("the API key is none of this server's; ask its operator for one")


def read_keys(file: Path) -> list[str]:
    """One key a line; empty lines and those that start with # count for nothing. Raises ConfigError."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"there is no API key in {file}; write one a line")
    return keys


def _key_of(headers: CIMultiDictProxy[str]) -> str:
    authorization = headers.get("Authorization", "")
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    return headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
