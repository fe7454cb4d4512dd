"""Claim checks: a request that is too large for one message goes without its prompt, which lies in chunks in a stream.

Headers count: what decides is the message as the server weighs it. The chunks are deleted by the broker a grace time after
the request has ended; those of a failed one go by the stream's age, since its dead letter may be requeued.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from shared.errors import NotFound, PayloadTooLarge
from shared.protocol import codec, subjects
from shared.protocol.messages import ClaimCheck, GenerateRequest
from shared.transport.base import Headers, Transport
from shared.transport.wire import message_bytes

CHUNK_BYTES: Final = 256 << 10
_ENVELOPE_BYTES: Final = 2048  # headers that an append adds: message id, expectations
_PAGE: Final = 8
_SMALL_PROMPT_BYTES: Final = 16 << 10  # with any payload limit in use it goes in one message


async def pack(
    transport: Transport, request: GenerateRequest, headers: Headers, *, most_bytes: int, timeout: float
) -> bytes:
    """The message that carries a request: itself, or a claim check once its prompt is stored.

    Raises:
        PayloadTooLarge: the prompt is over `most_bytes`, or what goes beside it is too large for a message.
        Unavailable, Overloaded: the prompt could not be stored.
    """
    data = codec.encode(request)
    room = min(transport.max_payload_bytes, subjects.REQUESTS.max_msg_bytes) - _ENVELOPE_BYTES
    if message_bytes(data, headers) <= room:
        return data
    if len(request.prompt) > most_bytes:
        raise PayloadTooLarge(
            f"a prompt may have {most_bytes // 4} tokens here, not {len(request.prompt) // 4}"
        )
    check = ClaimCheck(
        request=msgspec.structs.replace(request, prompt=b""),
        prompt_bytes=len(request.prompt),
        prompt_digest=hashlib.sha256(request.prompt).digest(),
    )
    data = codec.encode(check)
    if message_bytes(data, headers) > room:
        raise PayloadTooLarge(f"a request without its prompt may have {room} bytes, not {len(data)}")
    chunk = min(CHUNK_BYTES, room)
    for number, begin in enumerate(range(0, len(request.prompt), chunk)):
        await transport.append(
            subjects.body(request.request_id),
            request.prompt[begin : begin + chunk],
            message_id=f"{request.request_id}-body-{number}",
            timeout=timeout,
        )
    return data


async def redeem(transport: Transport, check: ClaimCheck) -> GenerateRequest:
    """The whole request.

    Raises:
        NotFound: its prompt is not there, or not all of it.
        Unavailable: the server does not answer.
    """
    subject = subjects.body(check.request.request_id)
    parts: list[bytes] = []
    size = after = 0
    while size < check.prompt_bytes:
        page = await transport.read(subjects.BODIES.name, subject, after=after, limit=_PAGE)
        if not page:
            break
        parts.extend(stored.data for stored in page)
        size = sum(map(len, parts))
        after = page[-1].sequence
    prompt = b"".join(parts)
    if hashlib.sha256(prompt).digest() != check.prompt_digest:
        raise NotFound("the prompt of a request is not there any more", code="body_lost")
    return msgspec.structs.replace(check.request, prompt=prompt)


def may_be_checked(prompt_tokens: int) -> bool:
    """Whether a prompt of this length may lie in chunks."""
    return 4 * prompt_tokens > _SMALL_PROMPT_BYTES


async def forget(transport: Transport, request_id: str) -> None:
    """Delete a prompt's chunks. Raises Unavailable."""
    await transport.purge(subjects.BODIES.name, subjects.body(request_id))
