"""Whole processes: a worker that is killed in mid-stream, one that drains, one that hits what it published."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.gpu_worker.process import (
    NO_CACHE,
    Client,
    free_port,
    greedy,
    readiness,
    worker_process,
)
from tests.unit.services.gpu_worker.rig import SAMPLING
from tests.unit.services.gpu_worker.scripted import ScriptedBroker

PROMPT = tuple(3 + (7 * position) % 500 for position in range(150))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
async def test_c2_a_killed_worker_s_stream_is_continued_bit_for_bit(
    sampled: bool, nats_url: str, client: Client, broker: ScriptedBroker, tiny_model: Path, tmp_path: Path
) -> None:
    sampling = SAMPLING if sampled else greedy(SAMPLING)
    changes = {"sampling": sampling, "max_tokens": 300, "choices": 2 if sampled else 1}
    choices = 2 if sampled else 1
    with worker_process(nats_url, tmp_path, tiny_model, "w1") as first:
        await client.find_worker("w1")
        await client.enqueue(client.request("cut", PROMPT, **changes))
        cut = await client.until("cut", lambda state: min(state.offsets) >= 40, choices)
        first.send_signal(signal.SIGKILL)
        first.wait(30)
    assert cut.terminal is None
    with worker_process(nats_url, tmp_path, tiny_model, "w2"):
        await client.find_worker("w2")
        resumed, terminal = await client.ended("cut", choices)
        await client.enqueue(client.request("whole", PROMPT, **changes, cache=NO_CACHE))
        whole, undisturbed = await client.ended("whole", choices)
    assert (terminal.attempt, terminal.worker_id, terminal.failure) == (2, "w2", None)
    assert resumed.starts == 2
    assert [len(choice) for choice in resumed.tokens] == [300] * choices
    assert resumed.tokens == whole.tokens
    assert [end.finish for end in terminal.ends] == [end.finish for end in undisturbed.ends]


async def test_a_second_turn_hits_and_a_drain_ends_clean(
    nats_url: str, client: Client, broker: ScriptedBroker, tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    with worker_process(nats_url, tmp_path, tiny_model, "w1", health_port=str(port)) as process:
        await client.find_worker("w1")
        assert readiness(port)[0] == 200
        await client.enqueue(client.request("turn1", PROMPT, max_tokens=16))
        first, opening = await client.ended("turn1")
        turn2 = PROMPT + first.tokens[0] + tuple(range(10, 40))
        await client.enqueue(client.request("turn2", turn2, max_tokens=16))
        second, hit = await client.ended("turn2")
        await client.enqueue(client.request("cold", turn2, max_tokens=16, cache=NO_CACHE))
        cold, _ = await client.ended("cold")
        assert (opening.cached_tokens, opening.cache_decision) == (0, "miss")
        assert (hit.cached_tokens, hit.cache_decision) == (128, "hit")
        assert second.tokens == cold.tokens
        await client.enqueue(client.request("long", PROMPT, max_tokens=150))
        await client.until("long", lambda state: min(state.offsets) >= 20)
        process.send_signal(signal.SIGTERM)
        long, end = await client.ended("long")
        assert (len(long.tokens[0]), end.attempt) == (150, 1)
        assert await _exit_status(process) == 0
    assert not broker.leases


async def _exit_status(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 60)
