"""Claim checks: what fits goes as it is, what does not comes back whole, what is over the limit is refused by name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import NotFound, PayloadTooLarge
from shared.protocol import codec, subjects
from shared.protocol.messages import ClaimCheck, GenerateRequest
from shared.transport import bodies
from shared.transport.memory import MemoryServer, MemoryTransport
from shared.transport.wire import message_bytes
from tests.unit.services.gpu_worker.rig import make_request

HEADERS = {"traceparent": "00-1"}
ROOM = 8000
OVERHEAD = 2048


async def _transport(payload: int = ROOM + OVERHEAD) -> MemoryTransport:
    transport = MemoryServer(max_payload_bytes=payload).transport()
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    return transport


async def _pack(transport: MemoryTransport, request: GenerateRequest, most: int = 1 << 20) -> bytes:
    return await bodies.pack(transport, request, HEADERS, most_bytes=most, timeout=5)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 40_000))
async def test_fr_94_a_request_of_any_size_comes_back_bit_for_bit_and_every_message_fits(size: int) -> None:
    transport = await _transport()
    request = make_request(prompt=bytes(index % 251 for index in range(4 * size)))
    data = await _pack(transport, request)
    assert message_bytes(data, HEADERS) <= ROOM
    work = codec.decode(data)
    if isinstance(work, ClaimCheck):
        assert message_bytes(codec.encode(request), HEADERS) > ROOM
        assert await bodies.redeem(transport, work) == request
        await bodies.forget(transport, request.request_id)
        with pytest.raises(NotFound):
            await bodies.redeem(transport, work)
    else:
        assert work == request
        assert await transport.waiting(subjects.BODIES.name, "body.*") == {}


async def test_packing_again_stores_nothing_twice() -> None:
    transport = await _transport()
    request = make_request(prompt=b"abcd" * 5000)
    first, second = await _pack(transport, request), await _pack(transport, request)
    assert first == second
    check = codec.decode_as(ClaimCheck, second)
    assert await bodies.redeem(transport, check) == request


async def test_fr_94_a_prompt_over_the_limit_is_refused_and_nothing_is_stored() -> None:
    transport = await _transport()
    with pytest.raises(PayloadTooLarge, match="may have 2500 tokens"):
        await _pack(transport, make_request(prompt=b"abcd" * 5000), most=10_000)
    cache = msgspec.structs.replace(make_request().cache, labels=("x" * 9000,))
    with pytest.raises(PayloadTooLarge, match="without its prompt"):
        await _pack(transport, make_request(prompt=b"abcd" * 5000, cache=cache))
    assert await transport.waiting(subjects.BODIES.name, "body.*") == {}


async def test_a_prompt_that_is_not_whole_is_not_taken_for_it() -> None:
    transport = await _transport()
    check = codec.decode_as(ClaimCheck, await _pack(transport, make_request(prompt=b"abcd" * 8000)))
    stored = await transport.read(subjects.BODIES.name, subjects.body("r1"))
    await transport.delete(subjects.BODIES.name, stored[1].sequence)
    with pytest.raises(NotFound) as caught:
        await bodies.redeem(transport, check)
    assert caught.value.code == "body_lost"
