"""A prompt larger than the server's payload limit, through a real server."""

from __future__ import annotations

import secrets

from shared.protocol import codec, subjects
from shared.protocol.messages import ClaimCheck
from shared.transport import bodies
from shared.transport.nats import connect
from tests.unit.services.gpu_worker.rig import make_request


async def test_fr_94_a_million_tokens_go_by_claim_check(nats_url: str) -> None:
    transport = await connect(nats_url, name="bodies")
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    request = make_request(prompt=secrets.token_bytes(4_000_000))
    headers = {"traceparent": "00-1", "burstline-tenant": "t" * 200}
    data = await bodies.pack(transport, request, headers, most_bytes=8 << 20, timeout=30)
    subject = subjects.request_shared(request.namespace.fingerprint, "normal", "t")
    await transport.append(subject, data, headers=headers)
    work = await transport.take(subjects.work_consumer(subject, ack_wait_s=30))
    assert work is not None
    check = codec.decode_as(ClaimCheck, work.message.data)
    assert await bodies.redeem(transport, check) == request
    await bodies.forget(transport, request.request_id)
    assert await transport.waiting(subjects.BODIES.name, "body.*") == {}
    await transport.close()
