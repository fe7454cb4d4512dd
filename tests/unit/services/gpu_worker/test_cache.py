"""Captures, leases, evictions: a fault of any of them is a miss (C3), and the books agree (C5)."""

from __future__ import annotations

import asyncio

import pytest

from services.gpu_worker.engine.stats import Pressure
from shared.protocol import chain, codec, subjects
from shared.protocol.messages import (
    Abort,
    AuditCall,
    AuditReply,
    Commit,
    Freed,
    Lease,
    Message,
    Release,
    Reserve,
    Withdraw,
)
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import ROW_BYTES, STATE_BYTES, stream

ROOT = chain.root(make_request().namespace)
KEY = chain.chain(ROOT, PROMPT)[-1]


def _count(running: Running, outcome: str) -> float:
    return running.core.metrics.captures.labels(outcome)._value.get()


async def _one(here: World, request_id: str = "r1", **changes: object) -> object:
    await here.enqueue(make_request(request_id, clock=here.clock, **changes))
    return await here.terminal(request_id)


async def test_a_capture_is_reserved_kept_and_committed_before_the_terminal() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here)
        (reserve,) = here.broker.asked(Reserve)
        assert isinstance(reserve, Reserve)
        assert (reserve.root, reserve.key, reserve.parent, reserve.parent_position) == (ROOT, KEY, None, 0)
        assert (reserve.position, reserve.state_bytes, reserve.kv_bytes) == (
            192,
            STATE_BYTES,
            192 * ROW_BYTES,
        )
        (commit,) = here.broker.asked(Commit)
        assert isinstance(commit, Commit)
        assert commit.reservation_id == f"r-{KEY.hex()[:8]}"
        assert running.engine.entries == {KEY: 192}
        assert _count(running, "published") == 1


@pytest.mark.parametrize("decision", ["exists", "skips_budget", "skips_pinned"])
async def test_a_refused_capture_is_discarded_and_counted(decision: str) -> None:
    async with world() as here:
        here.broker.reserve = [decision]
        running = await here.worker()
        await _one(here)
        assert running.engine.discarded == [1]
        assert _count(running, decision) == 1
        assert here.broker.asked(Commit) == []
        await until(lambda: running.engine.at_baseline)


async def test_the_broker_s_keys_are_withdrawn_evicted_and_refunded_then_it_is_asked_again() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        here.broker.reserve, here.broker.evict = ["evict"], (KEY,)
        other = make_request(clock=here.clock).prompt[4:] + b"\1\0\0\0"
        await _one(here, "r2", prompt=other)
        assert KEY not in running.engine.entries
        assert len(running.engine.entries) == 1
        order = [
            type(call) for call in here.broker.calls if isinstance(call, Reserve | Withdraw | Freed | Commit)
        ]
        assert order == [Reserve, Commit, Reserve, Withdraw, Freed, Reserve, Commit]
        (freed,) = here.broker.asked(Freed)
        assert isinstance(freed, Freed)
        assert freed.keys == (KEY,)


async def test_a_broker_that_asks_for_evictions_for_ever_is_given_up() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        here.broker.reserve, here.broker.evict = ["evict"] * 9, (KEY,)
        await _one(here, "r2", prompt=make_request().prompt[4:] + b"\1\0\0\0")
        assert len(here.broker.asked(Reserve)) < 6
        assert running.engine.pending == {}


@pytest.mark.parametrize("call", [Reserve, Commit, Lease, Release])
async def test_c3_a_failing_broker_call_costs_the_cache_and_never_the_stream(call: type[Message]) -> None:
    async with world() as here:
        here.broker.failing = {call}
        running = await here.worker()
        await _one(here, "r1")
        await _one(here, "r2")
        for name in ("r1", "r2"):
            assert await here.tokens(name) == (stream(PROMPT, SEED, 20),)
        await until(lambda: running.engine.at_baseline)


async def test_a_commit_that_fails_takes_the_entry_back() -> None:
    async with world() as here:
        here.broker.failing = {Commit}
        running = await here.worker()
        await _one(here)
        assert running.engine.entries == {}
        await running.worker.evictor.relieve()
        assert here.broker.asked(Freed)
        assert running.worker.evictor.owed == 0


async def test_a_stale_capture_gives_its_grant_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as here:
        running = await here.worker()

        def stale(capture_id: int) -> bool:
            running.engine.pending.pop(capture_id)
            return False

        monkeypatch.setattr(running.engine, "publish", stale)
        await _one(here)
        assert len(here.broker.asked(Abort)) == 1
        assert here.broker.asked(Commit) == []
        assert _count(running, "stale") == 1


async def test_c3_without_a_broker_every_request_runs_cold() -> None:
    async with world() as here:
        await here.broker.stop()
        running = await here.worker()
        running.engine.entries[KEY] = 192  # an entry that cannot be leased now
        terminal = await _one(here)
        assert terminal.cache_decision == "lease_unavailable"  # type: ignore[attr-defined]
        assert terminal.cached_tokens == 0  # type: ignore[attr-defined]
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)
        await until(lambda: running.engine.at_baseline)


@pytest.mark.parametrize("reason", ["gone", "evicting", "not_held_here", "wrong_namespace"])
async def test_a_refused_lease_is_a_miss_with_its_reason(reason: str) -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        here.broker.lease_reason = reason
        terminal = await _one(here, "r2")
        assert terminal.cache_decision == f"lease_{reason}"  # type: ignore[attr-defined]
        assert terminal.cached_tokens == 0  # type: ignore[attr-defined]
        assert running.engine.holds == {}


async def test_a_hit_that_the_engine_gave_up_is_told_and_its_lease_released() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        running.engine.drop_hits = True
        running.engine.budget = 0
        await here.enqueue(make_request("r2", clock=here.clock))
        await until(lambda: len(running.engine.submitted) == 2)
        await running.let_go(1)
        await until(lambda: not here.broker.leases)  # while the request still runs
        assert running.engine.runs
        await running.let_go()
        terminal = await here.terminal("r2")
        assert (terminal.cache_decision, terminal.cached_tokens) == ("hit_dropped", 0)


async def test_after_a_silent_broker_captures_are_given_up_at_once_for_a_while() -> None:
    async with world() as here:
        await here.broker.stop()
        running = await here.worker(settings={"broker_cooldown_s": 2.0})
        await _one(here, "r1")
        await here.broker.start()
        await _one(here, "r2", prompt=make_request().prompt[4:])
        assert here.broker.asked(Reserve) == []
        here.clock.advance(3)
        await _one(here, "r3", prompt=make_request().prompt[8:])
        taken_back, reserved = here.broker.asked(Reserve)
        assert (taken_back.request_id, taken_back.state_bytes) == ("r1", 0)  # it may have stood at the broker
        assert reserved.request_id == "r3"
        assert _count(running, "broker_away") == 2


async def test_fr_77_a_lease_is_released_on_every_way_out() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "warm")
        running.engine.budget = 0
        await here.enqueue(make_request("r1", clock=here.clock))
        await until(lambda: len(running.engine.submitted) == 2)
        assert len(here.broker.leases) == 1
        await here.cancel("r1")
        await here.terminal("r1")
        await until(lambda: not here.broker.leases and running.engine.at_baseline)


async def test_pressure_evicts_what_the_broker_lets_go() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here)
        running.engine.wanted = Pressure(blocks=1, snapshots=0)
        await running.let_go()  # the engine's thread looks again
        await until(lambda: running.engine.entries == {})
        await until(lambda: bool(here.broker.asked(Freed)))


async def test_a_leased_entry_is_not_evicted() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here)
        here.broker.refuse_withdraw = {KEY}
        running.engine.wanted = Pressure(blocks=1, snapshots=0)
        await running.let_go()
        await until(lambda: bool(here.broker.asked(Withdraw)))
        await running.worker.evictor.relieve()
        assert running.engine.entries == {KEY: 192}
        assert here.broker.asked(Freed) == []


async def test_an_entry_in_use_lingers_and_is_evicted_later() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here)
        running.engine.pinned = {KEY}
        assert await running.worker.evictor.free([KEY], reason="test") == 0
        assert here.broker.asked(Freed) == []
        running.engine.pinned = set()
        await running.worker.evictor.relieve()
        assert running.engine.entries == {}
        await running.worker.evictor.relieve()
        await until(lambda: bool(here.broker.asked(Freed)))


async def test_c5_without_a_broker_room_is_made_and_the_news_is_owed() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here)
        await here.broker.stop()
        running.engine.wanted = Pressure(blocks=1, snapshots=0)
        await running.let_go()
        await until(lambda: running.engine.entries == {} and running.worker.evictor.owed == 1)
        await here.broker.start()
        here.clock.advance(2)
        await until(lambda: running.worker.evictor.owed == 0)
        kinds = [type(call) for call in here.broker.calls[-2:]]
        assert kinds == [Withdraw, Freed]


async def test_what_is_owed_of_an_entry_is_told_before_a_new_one_is_asked_for() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        here.broker.failing = {Freed}
        assert await running.worker.evictor.free([KEY], reason="test") == 1
        assert running.worker.evictor.owed == 1
        here.broker.calls.clear()
        await _one(here, "r2")  # the same prompt
        assert (running.engine.entries, here.broker.asked(Reserve)) == ({}, [])
        here.broker.failing = set()
        here.broker.calls.clear()
        await _one(here, "r3")
        assert running.engine.entries == {KEY: 192}
        told = [type(call) for call in here.broker.calls if isinstance(call, Freed | Reserve | Commit)]
        assert told == [Freed, Reserve, Commit]
        here.clock.advance(2)
        await running.worker.evictor.relieve()
        assert len(here.broker.asked(Freed)) == 1


async def test_the_audit_is_answered_with_what_is_held() -> None:
    async with world() as here:
        await here.worker()
        await _one(here)
        call = codec.encode(AuditCall(skip=0, limit=10))
        reply = codec.decode_as(
            AuditReply, await here.transport.request(subjects.audit("w1"), call, timeout=5)
        )
        assert reply.total == 1
        (held,) = reply.entries
        assert (held.root, held.key, held.state_bytes, held.kv_bytes) == (
            ROOT,
            KEY,
            STATE_BYTES,
            192 * ROW_BYTES,
        )
        past = codec.encode(AuditCall(skip=1, limit=10))
        page = codec.decode_as(
            AuditReply, await here.transport.request(subjects.audit("w1"), past, timeout=5)
        )
        assert page.entries == ()


async def test_the_terminal_waits_for_a_slow_publication_only_so_long() -> None:
    async with world() as here:
        hold = asyncio.Event()
        plain = here.broker._reply

        async def slow(received):  # type: ignore[no-untyped-def]
            if isinstance(codec.decode(received.data), Reserve):
                await hold.wait()
            return codec.encode(plain(codec.decode(received.data)))

        await here.broker.stop()
        here.broker._answer = slow  # type: ignore[method-assign]
        await here.broker.start()
        await here.worker(settings={"publish_wait_s": 0.05, "broker_timeout_s": 5.0})
        terminal = await _one(here)
        assert terminal.failure is None  # type: ignore[attr-defined]
        assert here.broker.asked(Commit) == []
        hold.set()
