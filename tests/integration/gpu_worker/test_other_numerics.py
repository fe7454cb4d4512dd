"""A worker of other numerics (another number of threads) goes on with a stream whose own workers are gone (C1.7)."""

from __future__ import annotations

from pathlib import Path

from services.gpu_worker import journal
from tests.integration.gpu_worker.process import Client, worker_process
from tests.unit.services.gpu_worker.scripted import ScriptedBroker

PROMPT = tuple(3 + (7 * position) % 500 for position in range(150))


async def test_c1_7_delivered_tokens_stand_and_the_answer_is_told_as_not_exact(
    nats_url: str, client: Client, broker: ScriptedBroker, tiny_model: Path, tmp_path: Path
) -> None:
    settings = {"ack_wait_s": "3", "adopt_after_s": "4"}
    with worker_process(nats_url, tmp_path, tiny_model, "w1", **settings) as first:
        mine = (await client.find_worker("w1")).fingerprint
        request = client.request("cut", PROMPT, max_tokens=400)
        await client.enqueue(request)
        await client.until("cut", lambda state: min(state.offsets) >= 20)
        first.kill()
        first.wait(30)
    delivered = (await journal.read(client.transport, "cut", 1)).tokens[0]
    with worker_process(nats_url, tmp_path, tiny_model, "w2", threads="2", **settings):
        other = (await client.find_worker("w2")).fingerprint
        assert other != mine
        taken, terminal = await client.ended("cut")
    assert (terminal.attempt, terminal.worker_id, terminal.exact) == (2, "w2", False)
    assert terminal.failure is None
    assert taken.tokens[0][: len(delivered)] == delivered
    assert len(taken.tokens[0]) == terminal.completion_tokens
    assert taken.mixed
