"""Reads a JSON body from the network without trusting it: bounded in bytes, time and shape, one meaning only.

Refused here, before any schema is asked: a wrong content type, a body over the limit (the read stops there), invalid
UTF-8, malformed JSON, NaN and infinities in any spelling, duplicate keys, lone surrogates, more nesting, objects or keys
than the limits allow. Long bodies are parsed in a thread, since other callers' streams share the event loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, NoReturn

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from shared.errors import ClientError, InvalidRequest, PayloadTooLarge

# A string without an end is taken to the end of the body: were it no match, each of its quotes would be tried again.
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_LENGTH: Final = re.compile(r"^[0-9]{1,18}$")
_THREAD_BYTES: Final = 64 << 10
"""A longer body is worth a thread: parsing it takes more than a millisecond."""


class UnsupportedMedia(ClientError):
    """The body is not declared as plain JSON."""

    code = "unsupported_media_type"
    status = 415


class BodyTimeout(ClientError):
    """The body did not arrive in time."""

    code = "request_timeout"
    status = 408


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """What a body may be at most: `size` in bytes, `depth` in levels, `containers` = objects and arrays in all, `keys` of
    one object, `time_s` to arrive."""

    size: int
    depth: int
    containers: int
    keys: int
    time_s: float


async def read_json_object(
    receive: Receive, headers: Mapping[str, str], limits: BodyLimits
) -> dict[str, object]:
    """The request's body as a JSON object; `headers` are the request's, in lower case, as the middleware decoded them once.

    Raises:
        UnsupportedMedia, PayloadTooLarge, BodyTimeout, InvalidRequest: as the module says.
        ClientDisconnect: the caller left while sending.
    """
    _check_headers(headers, limits.size)
    try:
        async with asyncio.timeout(limits.time_s):
            data = await _read(receive, limits.size)
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {limits.time_s:g} s") from error
    if len(data) > _THREAD_BYTES:
        return await asyncio.to_thread(parse_object, data, limits)
    return parse_object(data, limits)


def _check_headers(headers: Mapping[str, str], max_bytes: int) -> None:
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise UnsupportedMedia("the body must be sent as content-type: application/json (UTF-8)")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not accepted")
    length = headers.get("content-length")
    if length is not None and _LENGTH.match(length) and int(length) > max_bytes:
        raise _too_large(max_bytes)


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over the limit of {max_bytes} bytes")


def parse_object(data: bytes, limits: BodyLimits) -> dict[str, object]:
    """The JSON object that `data` spells. Linear in its size; raises InvalidRequest for everything else."""
    _check_shape(data, limits)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from error
    try:
        value = _decoder(limits.keys).decode(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"malformed JSON: {error.msg} at byte {error.pos}", code="invalid_json"
        ) from error
    except RecursionError as error:  # not reachable below max_depth; kept so that a raised limit stays a 400
        raise _too_deep(limits.depth) from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    if _SURROGATE.search(data):
        _check_unicode(value)
    return value


@cache
def _decoder(most_keys: int) -> json.JSONDecoder:
    """Of the one or two limits that a process has."""
    return json.JSONDecoder(
        object_pairs_hook=partial(_object, most=most_keys),
        parse_constant=_not_a_number,
        parse_float=_finite,
        parse_int=_integer,
    )


def _check_shape(data: bytes, limits: BodyLimits) -> None:
    depth = containers = 0
    for match in _STRUCTURE.finditer(data):
        first = match[0][0]
        if first in b"[{":
            depth += 1
            containers += 1
            if depth > limits.depth:
                raise _too_deep(limits.depth)
            if containers > limits.containers:
                raise InvalidRequest(
                    f"the body has more than {limits.containers} objects and arrays", code="invalid_json"
                )
        elif first in b"]}":
            depth -= 1


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {max_depth} levels", code="invalid_json")


def _object(pairs: list[tuple[str, object]], *, most: int) -> dict[str, object]:
    if len(pairs) > most:
        raise InvalidRequest(f"an object has more than {most} keys", code="invalid_json")
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest("a key stands twice in one object", code="invalid_json", param=name[:64])
            seen.add(name)
    return found


def _not_a_number(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not JSON", code="invalid_json")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest("a number is too large", code="invalid_json")
    return value


def _integer(text: str) -> int:
    if len(text) > 40:
        raise InvalidRequest("a number has too many digits", code="invalid_json")
    return int(text)


def _check_unicode(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("a string holds half of a surrogate pair", code="invalid_json") from error


__all__ = [
    "BodyLimits",
    "BodyTimeout",
    "ClientDisconnect",
    "UnsupportedMedia",
    "parse_object",
    "read_json_object",
]
