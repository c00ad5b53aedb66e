"""Reads a request's body as one JSON object, with limits on size, time and form."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from aiohttp import hdrs
from aiohttp.streams import StreamReader
from multidict import CIMultiDictProxy

from dynrt.runtime.errors import BodyTooLargeError, InvalidRequestError, UnsupportedMediaTypeError
from dynrt.runtime.http.request import Request

MAX_BODY_BYTES = 16 * 2**20
BODY_DEADLINE_S = 60.0
JSON = "application/json"
CONTENT_ENCODINGS = ("", "identity", "gzip", "deflate")  # what aiohttp decodes without further packages

_decode = msgspec.json.Decoder().decode
_NOT_A_NUMBER = re.compile(rb"-?(NaN|Infinity)")


class BrokenBodyError(Exception):
    """What came of a body is not what its headers say: in chunks, or compressed."""


async def read_object(request: Request) -> dict[str, Any]:
    """The body's JSON object. Raises the 400, 413 or 415 that tells what is wrong with it."""
    check_headers(request.headers)
    return decode_object(await _read(request.body))


def check_headers(headers: CIMultiDictProxy[str]) -> None:
    """Raise 413 or 415 if the headers alone tell that the body will not be taken."""
    media_type = headers.get(hdrs.CONTENT_TYPE, JSON)
    if media_type != JSON:
        _check_media_type(media_type)
    encoding = headers.get(hdrs.CONTENT_ENCODING)
    if encoding is not None and encoding.strip().lower() not in CONTENT_ENCODINGS:
        raise unsupported_encoding()
    if int(headers.get(hdrs.CONTENT_LENGTH, 0)) > MAX_BODY_BYTES:
        raise too_large()


def _check_media_type(content_type: str) -> None:
    """Of a Content-Type that is not the usual one: it may have parameters, or be written otherwise."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != JSON and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError(
            f"the body's Content-Type is {media_type[:100]}; send JSON with Content-Type: {JSON}"
        )


def unsupported_encoding() -> UnsupportedMediaTypeError:
    return UnsupportedMediaTypeError("the body's Content-Encoding is not one of gzip, deflate or identity")


def too_large() -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is larger than {MAX_BODY_BYTES} bytes, the most that is read; shorten it"
    )


async def _read(body: StreamReader) -> bytes:
    try:
        if body.is_eof():  # all is here, as of most requests: there is nothing to wait for
            return _within_limit(body.read_nowait())
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await _read_arriving(body)
    except TimeoutError:
        raise InvalidRequestError(
            f"the body did not arrive within {BODY_DEADLINE_S:g} s; send it faster"
        ) from None
    except BrokenBodyError:
        raise InvalidRequestError(
            "the body is not framed, or not encoded, as its Transfer-Encoding or Content-Encoding says; send it again"
        ) from None


async def _read_arriving(body: StreamReader) -> bytes:
    pieces, size = [], 0
    while piece := await body.readany():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise too_large()
    return b"".join(pieces)


def _within_limit(raw: bytes) -> bytes:
    if len(raw) > MAX_BODY_BYTES:
        raise too_large()
    return raw


def decode_object(raw: bytes) -> dict[str, Any]:
    """`raw` as a JSON object; of a key that is there twice, the last one counts."""
    try:
        value = _decode(raw)
    except RecursionError:
        raise InvalidRequestError("the body's JSON is nested too deeply; flatten it") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(_malformed(raw, str(error))) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            "the body is JSON, but not an object; send {...} with the parameters as fields"
        )
    return value


def _malformed(raw: bytes, reason: str) -> str:
    """Why `raw` is not JSON, with the usual causes named."""
    if not raw.strip():
        return "the body is empty; send a JSON object"
    if raw.startswith(b"\xef\xbb\xbf"):
        return "the body starts with a byte order mark; send JSON as UTF-8 without one"
    at = re.search(r"\(byte (\d+)\)", reason)
    if (at and _NOT_A_NUMBER.match(raw, max(0, int(at[1]) - 1))) or (
        at and _NOT_A_NUMBER.match(raw, int(at[1]))
    ):
        return f"the body has NaN or Infinity at byte {at[1]}, which are not JSON; send a finite number"
    if "out of range" in reason:
        return f"the body has a number that is too large: {reason}; send a finite number"
    return f"the body is not valid JSON in UTF-8: {reason}"
