"""A TLS certificate that can be replaced while it is in use."""

from __future__ import annotations

import ssl

from dynrt.runtime.errors import ConfigError


class Certificate:
    """`context` serves the newest certificate that could be read; open connections keep theirs."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert = cert
        self._key = key
        self.context = self._load_into(_new_context())

    def reload(self) -> None:
        """Raises ConfigError, and keeps the certificate it had, if the files do not go together."""
        self._load_into(_new_context())  # a context is spoilt by a certificate whose key is another's
        self._load_into(self.context)

    def _load_into(self, context: ssl.SSLContext) -> ssl.SSLContext:
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(
                f"cannot use the TLS certificate {self._cert} with the key {self._key}: {error}; "
                "both must be PEM files that belong together, the key without a password"
            ) from None
        return context


def _new_context() -> ssl.SSLContext:
    return ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)


def _no_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise ValueError("the key wants a password")
