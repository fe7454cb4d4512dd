"""What a worker leaves on its own subject another takes, within an acknowledgement wait and a second, and is not disturbed
by a worker that comes back (C2, FR-96)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.gpu_worker.posts import MOST
from shared.clock import SYSTEM
from shared.protocol import codec, subjects
from shared.protocol.messages import GenerateRequest, Started, Terminal
from shared.protocol.subjects import ConsumerSpec
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


async def test_c2_requests_that_lie_in_the_polls_of_a_stopped_worker_are_taken_over_in_time(
    nats_url: str, client: Client, broker: ScriptedBroker, tiny_model: Path, tmp_path: Path
) -> None:
    """As many as it may have polls: each was handed to it, none was read, and none waits longer than one would."""
    tenants = [f"tenant{number}" for number in range(MOST)]
    options = {"ack_wait_s": ACK_WAIT_S, "pull_wait_s": "60"}
    with worker_process(nats_url, tmp_path, tiny_model, "w1", **options) as first:
        await client.find_worker("w1")
        lanes = [subjects.request_shared(client.fingerprint, "normal", tenant) for tenant in tenants]
        for tenant in tenants:
            await client.enqueue(_of(client, tenant, "before"))
            await client.ended(f"{tenant}-before")
        await _all_lanes(client, lanes, "num_waiting")
        first.send_signal(signal.SIGSTOP)
        with worker_process(nats_url, tmp_path, tiny_model, "w2", **options):
            await client.find_worker("w2")
            handed_ns = SYSTEM.monotonic_ns()
            for tenant in tenants:
                await client.enqueue(_of(client, tenant, "after"))
            await _all_lanes(client, lanes, "num_ack_pending")  # every one lies in a poll of the first
            states = await asyncio.gather(
                *(client.until(f"{tenant}-after", lambda state: bool(state.worker_id)) for tenant in tenants)
            )
            takeover_s = (SYSTEM.monotonic_ns() - handed_ns) / 1e9
            ends = [await client.ended(f"{tenant}-after") for tenant in tenants]
    assert {state.worker_id for state in states} == {"w2"}
    assert float(ACK_WAIT_S) - 0.5 <= takeover_s <= float(ACK_WAIT_S) + 1 + SLACK_S
    assert [terminal.attempt for _, terminal in ends] == [1] * MOST


def _of(client: Client, tenant: str, when: str) -> GenerateRequest:
    plain = client.request(f"{tenant}-{when}", PROMPT[:40], max_tokens=4, cache=NO_CACHE)
    return msgspec.structs.replace(
        plain, tenant=tenant, namespace=msgspec.structs.replace(plain.namespace, tenant=tenant)
    )


async def _all_lanes(client: Client, lanes: Sequence[str], count: str) -> None:
    """Until the server says one (`count`) of each lane's consumer."""
    specs = [subjects.work_consumer(lane, ack_wait_s=float(ACK_WAIT_S)) for lane in lanes]
    async with asyncio.timeout(DEADLINE_S):
        while any([await _told(client, spec, count) != 1 for spec in specs]):  # noqa: ASYNC110 - the server knows
            await asyncio.sleep(0.05)


async def _told(client: Client, spec: ConsumerSpec, count: str) -> int:
    call = f"$JS.API.CONSUMER.INFO.{spec.stream}.{spec.durable}"
    answer = await client.transport.request(call, b"", timeout=5)
    return int(msgspec.json.decode(answer).get(count, -1))


def _ways_out(port: int) -> float:
    """How often the first worker was done with the request: fenced."""
    return metric(port, "burstline_worker_requests_total")


async def _journal(client: Client, request_id: str) -> list[object]:
    stored = await client.transport.read(subjects.JOURNAL.name, subjects.tokens(request_id))
    return [codec.decode(message.data) for message in stored]
