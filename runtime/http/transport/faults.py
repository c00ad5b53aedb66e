"""What a client is told of bytes that are no HTTP request."""

from __future__ import annotations

from aiohttp import HttpVersion10
from aiohttp.http import HttpProcessingError, RawRequestMessage
from aiohttp.http_exceptions import ContentEncodingError, InvalidURLError, LineTooLong
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from dynrt.runtime.errors import DynrtError, HeadersTooLargeError, InvalidRequestError
from dynrt.runtime.http.body import unsupported_encoding

MAX_LINE_BYTES = 8190  # of the request line, and of each header

# What stands for a request that could not be parsed.
NO_REQUEST = RawRequestMessage(
    "UNKNOWN", "/", HttpVersion10, CIMultiDictProxy(CIMultiDict()), (), True, None, False, False, URL("/")
)


def told_of_fault(fault: HttpProcessingError) -> DynrtError:
    """Nothing of the bytes is repeated."""
    match fault:
        case LineTooLong():
            return HeadersTooLargeError(
                f"the request line or a header is larger than {MAX_LINE_BYTES} bytes, the most that is read;"
                " shorten it"
            )
        case ContentEncodingError():
            return unsupported_encoding()
        case InvalidURLError():
            return InvalidRequestError(
                "the URL of the request cannot be parsed; escape what is special in it"
            )
    reason = (fault.message or "it cannot be parsed").partition("\n")[0].rstrip(":. ")
    return InvalidRequestError(f"this is no valid HTTP request: {reason}")
