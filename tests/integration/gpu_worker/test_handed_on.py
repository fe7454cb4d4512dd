"""What a worker leaves on its own subject another takes, within an acknowledgement wait and a second, and is not disturbed
by a worker that comes back (C2, FR-96)."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from shared.clock import SYSTEM
from shared.protocol import codec, subjects
from shared.protocol.messages import GenerateRequest, Started, Terminal
from tests.integration.gpu_worker.process import (
    DEADLINE_S,
    NO_CACHE,
    Client,
    free_port,
    metric,
    worker_process,
)
from tests.unit.services.gpu_worker.scripted import ScriptedBroker

ACK_WAIT_S = "3"
SLACK_S = 2.0
"""For a machine that has more to do than this."""
PROMPT = tuple(3 + (7 * position) % 500 for position in range(150))


async def _enqueue_to(client: Client, request: GenerateRequest, worker: str) -> None:
    subject = subjects.request_to(client.fingerprint, worker, request.tenant)
    await client.transport.append(subject, codec.encode(request), message_id=request.request_id)


async def test_c2_a_worker_that_comes_back_takes_nothing_from_the_one_that_took_over(
    nats_url: str, client: Client, broker: ScriptedBroker, tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    with (
        worker_process(
            nats_url, tmp_path, tiny_model, "w1", health_port=str(port), ack_wait_s=ACK_WAIT_S
        ) as first,
        worker_process(nats_url, tmp_path, tiny_model, "w2", ack_wait_s=ACK_WAIT_S),
    ):
        await client.find_worker("w1")
        await client.find_worker("w2")
        request = client.request("cut", PROMPT, max_tokens=400)
        await _enqueue_to(client, request, "w1")
        await client.until("cut", lambda state: min(state.offsets) >= 20)
        first.send_signal(signal.SIGSTOP)
        stopped_ns = SYSTEM.monotonic_ns()
        try:
            await client.until("cut", lambda state: state.worker_id == "w2")
            takeover_s = (SYSTEM.monotonic_ns() - stopped_ns) / 1e9
            first.send_signal(signal.SIGCONT)
            taken, terminal = await client.ended("cut")
            async with asyncio.timeout(DEADLINE_S):
                while await asyncio.to_thread(_ways_out, port) < 1:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            await client.enqueue(client.request("whole", PROMPT, max_tokens=400, cache=NO_CACHE))
            whole, _ = await client.ended("whole")
        finally:
            first.send_signal(signal.SIGCONT)
    assert takeover_s <= float(ACK_WAIT_S) + 1 + SLACK_S
    assert (terminal.attempt, terminal.worker_id, taken.starts) == (2, "w2", 2)
    assert taken.tokens == whole.tokens
    kinds = [type(one) for one in await _journal(client, "cut")]
    assert (kinds.count(Started), kinds.count(Terminal), kinds[-1]) == (2, 1, Terminal)


def _ways_out(port: int) -> float:
    """How often the first worker was done with the request: fenced."""
    return metric(port, "burstline_worker_requests_total")


async def _journal(client: Client, request_id: str) -> list[object]:
    stored = await client.transport.read(subjects.JOURNAL.name, subjects.tokens(request_id))
    return [codec.decode(message.data) for message in stored]
