"""The reader of one stream, beside what the whole gateway's tests show of it."""

from __future__ import annotations

import pytest

from services.gateway.reader import Claimed, TokenReader
from shared.clock import SYSTEM
from shared.protocol import codec, subjects
from shared.transport.memory import MemoryTransport
from tests.property.shared.test_stream import started
from tests.unit.services.gpu_worker.rig import make_request


@pytest.mark.parametrize("patience_s", [0.02, 5.0])
async def test_a_quiet_stream_is_looked_up_in_the_journal_however_short_the_patience_of_each_call(
    patience_s: float,
) -> None:
    """Nothing is heard live and nothing is known to be lost: a subscription that a server forgot."""
    transport = MemoryTransport()
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    await transport.append(subjects.tokens("r"), codec.encode(started(1, (0,))))
    reader = await TokenReader.open(transport, make_request("r"), SYSTEM, quiet_s=0.2, stuck_s=60)
    until = SYSTEM.monotonic_ns() + 10_000_000_000
    news = None
    while news is None and SYSTEM.monotonic_ns() < until:
        news = await reader.next(patience_s)
    assert news == Claimed(started=started(1, (0,)))
    await reader.close()
