"""A worker and the real broker: conversations of two tenants under small quotas and small pools, then the audit (C5)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.protocol.messages import Terminal
from tests.integration.gpu_worker.books import SYSTEM_PROMPT, balanced, broker, turn
from tests.integration.gpu_worker.process import NO_CACHE, Client, free_port, metric, worker_process


async def _conversation(client: Client, name: str, tenant: str, turns: int, salt: int) -> list[Terminal]:
    """Turns that each continue the last, and what each of them reused."""
    prompt, terminals = SYSTEM_PROMPT + (salt,) * 9, []
    for number in range(turns):
        answer, terminal = await turn(client, f"{name}-{number}", tenant, prompt)
        cold, _ = await turn(client, f"{name}-{number}-cold", tenant, prompt, NO_CACHE)
        assert answer == cold
        assert terminal.failure is None
        terminals.append(terminal)
        prompt = prompt + answer + tuple(200 + (salt + number * 17 + i) % 250 for i in range(60))
    return terminals


@pytest.mark.parametrize(
    ("quota", "blocks"),
    [(64 << 20, "128"), (450_000, "128"), (64 << 20, "9")],
    ids=["roomy", "quota", "pool"],
)
async def test_c5_the_books_are_the_bytes_after_conversations(
    quota: int,
    blocks: str,
    migrated_url: str,
    nats_url: str,
    client: Client,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    async with broker(migrated_url, client) as line:
        one, two = await line.tenant("one", quota), await line.tenant("two", quota)
        port = free_port()
        sizes = {"num_blocks": blocks, "max_context": "576", "health_port": str(port)}
        with worker_process(nats_url, tmp_path, tiny_model, "w1", **sizes):
            await client.find_worker("w1")
            first = await _conversation(client, "a", one, 4, salt=1)
            other = await _conversation(client, "b", two, 2, salt=1)
            again = await _conversation(client, "c", one, 2, salt=2)
            report = await line.audit()
            evicted = await asyncio.to_thread(metric, port, "burstline_worker_evictions_total")
    balanced(report)
    assert report.asked == ("w1",)
    assert first[0].cached_tokens == 0
    assert other[0].cached_tokens == 0  # C4: another tenant's same prompt
    roomy = quota > 10_000_000 and blocks == "128"
    assert (evicted == 0) == roomy
    if roomy:
        assert [turn.cached_tokens for turn in first[1:]] == [128, 192, 256]
        assert again[1].cached_tokens >= 128


async def test_c5_a_branch_point_inside_an_entry_splits_it_and_the_books_follow(
    migrated_url: str, nats_url: str, client: Client, tiny_model: Path, tmp_path: Path
) -> None:
    def prompt(salt: int) -> tuple[int, ...]:
        return SYSTEM_PROMPT + tuple(200 + (salt * 37 + i) % 250 for i in range(150))

    async with broker(migrated_url, client) as line:
        tenant = await line.tenant("one", 64 << 20)
        with worker_process(nats_url, tmp_path, tiny_model, "w1"):
            await client.find_worker("w1")
            deep = await turn(client, "deep", tenant, prompt(1))
            branch = await turn(client, "branch", tenant, prompt(2))
            balanced(await line.audit())
            shared, third = await turn(client, "third", tenant, prompt(3))
            cold, _ = await turn(client, "cold", tenant, prompt(3), NO_CACHE)
            _, again = await turn(client, "again", tenant, (*prompt(1), 5))
            report = await line.audit()
    balanced(report)
    assert (deep[1].cached_tokens, branch[1].cached_tokens) == (0, 0)
    assert third.cached_tokens == 128  # the system prompt, cut at the branch of the first two
    assert shared == cold
    assert again.cached_tokens == 256
    (books,) = report.books
    assert books.entries == 4


@pytest.mark.parametrize(
    ("shared", "quota"),
    [((192, 64, 128), 64 << 20), ((64, 128, 192), 450_000)],
    ids=["down-and-up", "upwards-under-a-quota"],
)
async def test_c5_an_entry_is_split_where_each_conversation_leaves_it(
    shared: tuple[int, ...],
    quota: int,
    migrated_url: str,
    nats_url: str,
    client: Client,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Conversations that share 64, 128 or 192 tokens with the first: the second of each kind starts at the branch."""
    first = SYSTEM_PROMPT + tuple(200 + i % 250 for i in range(120))

    def branch(length: int, salt: int) -> tuple[int, ...]:
        return first[:length] + tuple(210 + (salt * 29 + 7 * i) % 250 for i in range(70))

    async with broker(migrated_url, client) as line:
        tenant = await line.tenant("one", quota)
        port = free_port()
        with worker_process(nats_url, tmp_path, tiny_model, "w1", health_port=str(port)):
            await client.find_worker("w1")
            await turn(client, "first", tenant, first)
            for length in shared:
                reused = []
                for salt in (1, 2):
                    name, prompt = f"{length}-{salt}", branch(length, salt)
                    answer, terminal = await turn(client, name, tenant, prompt)
                    cold, _ = await turn(client, f"{name}-cold", tenant, prompt, NO_CACHE)
                    assert answer == cold
                    reused.append(terminal.cached_tokens)
                    balanced(await line.audit())
                assert reused[1] >= length or quota == 450_000
            _, again = await turn(client, "again", tenant, (*first, 5))
            balanced(await line.audit())
            evicted = await asyncio.to_thread(metric, port, "burstline_worker_evictions_total")
    assert (evicted > 0) == (quota == 450_000)
    assert again.cached_tokens == 256 or evicted
