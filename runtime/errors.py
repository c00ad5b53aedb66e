"""The errors dynrt raises on purpose, each mapped once to an HTTP status.

A message names the value at fault, the limit it broke and the way out.
"""

from __future__ import annotations


class DynrtError(Exception):
    """Root of every error that dynrt raises on purpose."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(DynrtError):
    """The request cannot be served as it is written."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested tokens do not fit into the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(DynrtError):
    """The request brings no API key, or one that this server does not take."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class ModelNotFoundError(DynrtError):
    """The request names a model that is not served."""

    status = 404
    kind = "not_found_error"
    code = "model_not_found"


class RouteNotFoundError(DynrtError):
    """No such URL."""

    status = 404
    kind = "not_found_error"


class MethodNotAllowedError(DynrtError):
    """The URL exists, but not for this HTTP method."""

    status = 405
    kind = "invalid_request_error"


class BodyTooLargeError(DynrtError):
    """The request body is over the limit."""

    status = 413
    kind = "invalid_request_error"


class UnsupportedMediaTypeError(DynrtError):
    """The request body is not JSON."""

    status = 415
    kind = "invalid_request_error"


class HeadersTooLargeError(DynrtError):
    """The request line or a header is over the limit."""

    status = 431
    kind = "invalid_request_error"


class NotBuiltError(DynrtError):
    """A known route of the API that this server does not have."""

    status = 501
    kind = "not_implemented_error"


class OverloadedError(DynrtError):
    """No room at present; `retry_after_s` says when to try again."""

    status = 503
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkerError(OverloadedError):
    """No worker that could serve this request is up."""


class WorkerLostError(OverloadedError):
    """The worker of a running request died and no other could take over."""


class EngineError(DynrtError):
    """An engine reported a failure of its own while serving a request."""


class RankLostError(EngineError):
    """A process that computes a part of an engine's model died or hangs: the engine ends."""


class ConfigError(DynrtError):
    """The configuration cannot work; raised before anything is started."""


class ModelLoadError(ConfigError):
    """The model cannot be found or read."""


class RegistrationError(DynrtError):
    """An engine was refused at registration."""


class MailboxFullError(DynrtError):
    """An actor's mailbox or a worker's outbox is at its bound."""


class AskTimeoutError(DynrtError):
    """An actor did not answer within its deadline."""

    status = 504
