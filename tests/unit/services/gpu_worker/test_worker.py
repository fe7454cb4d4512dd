"""Requests through the whole worker: the stream, its end, its acknowledgement, and every way out."""

from __future__ import annotations

import msgspec
import pytest

from shared.errors import ContextLengthExceeded
from shared.protocol import codec, subjects
from shared.protocol.messages import (
    CachePlan,
    ClaimCheck,
    Frame,
    Release,
    Speculation,
    Started,
    Terminal,
    pack_tokens,
    unpack_tokens,
)
from shared.transport import bodies
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, make_request, until, world
from tests.unit.services.gpu_worker.scripted import FINGERPRINT, stream, token_at


async def test_a_request_is_streamed_ended_and_acknowledged() -> None:
    async with world() as here:
        running = await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        terminal = await here.terminal()
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)
        (end,) = terminal.ends
        assert (end.finish, end.completion_tokens, end.emitted_tokens) == ("length", 20, 20)
        assert (terminal.prompt_tokens, terminal.cached_tokens, terminal.completion_tokens) == (200, 0, 20)
        assert (terminal.attempt, terminal.worker_id, terminal.failure, terminal.exact) == (
            1,
            "w1",
            None,
            True,
        )
        messages = await here.journalled()
        assert isinstance(messages[0], Started)
        assert messages[0].resumed_offsets == (0,)
        await until(lambda: here.waiting_items() == 0 and running.engine.at_baseline)
        await until(lambda: running.worker.room.taken == 0)


async def test_a_stop_id_is_counted_and_not_emitted() -> None:
    async with world() as here:
        await here.worker()
        stop = token_at(PROMPT, SEED, 9)
        await here.enqueue(make_request(clock=here.clock, stop_ids=(stop,)))
        (end,) = (await here.terminal()).ends
        assert (end.finish, end.stop_id, end.completion_tokens, end.emitted_tokens) == ("stop", stop, 10, 9)
        assert await here.tokens() == (stream(PROMPT, SEED, 9),)


async def test_choices_have_their_own_seeds_and_one_terminal() -> None:
    async with world() as here:
        running = await here.worker()
        await here.enqueue(make_request(clock=here.clock, choices=3, max_tokens=11))
        terminal = await here.terminal()
        seeds = [request.sampling.seed for request in running.engine.submitted]
        assert seeds[0] == SEED
        assert len(set(seeds)) == 3
        assert await here.tokens(choices=3) == tuple(stream(PROMPT, seed, 11) for seed in seeds)
        assert [end.completion_tokens for end in terminal.ends] == [11, 11, 11]
        assert terminal.completion_tokens == 33


async def test_logprobs_travel_with_their_tokens() -> None:
    async with world() as here:
        await here.worker()
        await here.enqueue(make_request(clock=here.clock, top_logprobs=1))
        await here.terminal()
        for frame in [message for message in await here.journalled() if isinstance(message, Frame)]:
            assert frame.logprobs is not None
            assert tuple(value.token for value in frame.logprobs) == unpack_tokens(frame.tokens)


async def test_bursts_coalesce_while_a_publish_is_in_flight() -> None:
    async with world() as here:
        running = await here.worker(budget=0)
        await here.enqueue(make_request(clock=here.clock, max_tokens=200))
        await until(lambda: bool(running.engine.submitted))
        here.server.online = False  # the journal cannot be reached while the engine goes on
        running.engine.budget = None
        running.core.host.cancel("nobody", "wakes the engine thread")
        await until(lambda: not running.engine.runs)
        here.server.online = True
        terminal = await here.terminal()
        assert await here.tokens() == (stream(PROMPT, SEED, 200),)
        frames = [message for message in await here.journalled() if isinstance(message, Frame)]
        assert len(frames) < 200 / running.engine.burst / 2
        assert terminal.completion_tokens == 200


async def test_a_request_that_cannot_be_served_ends_in_its_typed_error() -> None:
    async with world() as here:
        error = ContextLengthExceeded(prompt_tokens=200, max_tokens=20, window=128)
        running = await here.worker(submit_error=error)
        await here.enqueue(make_request(clock=here.clock))
        terminal = await here.terminal()
        assert terminal.failure is not None
        assert (terminal.failure.code, terminal.failure.status) == ("context_length_exceeded", 400)
        await until(lambda: here.waiting_items() == 0 and running.engine.at_baseline)


async def test_drafter_and_labels_reach_the_engine() -> None:
    async with world() as here:
        running = await here.worker()
        wanted = make_request(clock=here.clock)
        await here.enqueue(
            msgspec.structs.replace(
                wanted,
                cache=msgspec.structs.replace(wanted.cache, labels=("a", "b")),
                speculation=Speculation(drafter="ngram", k=2),
            )
        )
        await here.terminal()
        (submitted,) = running.engine.submitted
        assert (submitted.drafter, submitted.speculation_k, submitted.labels) == ("ngram", 2, ("a", "b"))
        assert running.engine.asked == [("a", "b")]


async def test_an_engine_fault_fails_the_request_loudly() -> None:
    async with world() as here:
        await here.worker(fault_at=8)
        await here.enqueue(make_request(clock=here.clock))
        terminal = await here.terminal()
        assert terminal.failure is not None
        assert terminal.failure.code == "engine_fault"
        assert terminal.ends[0].finish == "error"
        assert terminal.ends[0].emitted_tokens == 8


async def test_fr_108_an_expired_request_is_not_run() -> None:
    async with world() as here:
        request = make_request(clock=here.clock)
        here.clock.advance(601)
        running = await here.worker()
        await here.enqueue(request)
        terminal = await here.terminal()
        assert terminal.failure is not None
        assert terminal.failure.code == "deadline_exceeded"
        assert running.engine.submitted == []
        await until(lambda: here.waiting_items() == 0)


async def test_an_unreadable_work_item_is_kept_as_a_dead_letter() -> None:
    async with world() as here:
        await here.worker()
        subject = subjects.request_shared("f" * 64, "normal", "t")
        await here.transport.append(subject, b"not a message")
        await until(lambda: here.waiting_items() == 0)
        kept = await here.transport.last(subjects.DEAD.name, subjects.dead("f" * 64))
        assert kept is not None
        assert kept.data == b"not a message"


@pytest.mark.parametrize("prompt", [b"", b"\1\2\3"])
async def test_a_bad_prompt_ends_in_an_error(prompt: bytes) -> None:
    async with world() as here:
        await here.worker()
        await here.enqueue(make_request(clock=here.clock, prompt=prompt))
        failure = (await here.terminal()).failure
        assert failure is not None
        assert failure.code == "invalid_request"


async def test_another_fingerprint_is_refused() -> None:
    async with world() as here:
        running = await here.worker()
        request = make_request(clock=here.clock)
        import msgspec

        namespace = msgspec.structs.replace(request.namespace, fingerprint="f" * 16 + "0" * 48)
        await here.enqueue(make_request(clock=here.clock, namespace=namespace))
        failure = (await here.terminal()).failure
        assert failure is not None
        assert failure.code == "fingerprint_mismatch"
        assert running.engine.submitted == []


async def test_two_turns_hit_what_the_first_published() -> None:
    async with world() as here:
        running = await here.worker()
        await here.enqueue(make_request("r1", clock=here.clock))
        first = await here.terminal("r1")
        await here.enqueue(make_request("r2", clock=here.clock))
        second = await here.terminal("r2")
        assert (first.cache_decision, first.cached_tokens) == ("miss", 0)
        assert (second.cache_decision, second.cached_tokens) == ("hit", 192)
        assert await here.tokens("r1") == await here.tokens("r2")
        started = (await here.journalled("r2"))[0]
        assert isinstance(started, Started)
        assert started.cached_tokens == 192
        await until(lambda: not here.broker.leases)
        assert len(here.broker.asked(Release)) == 1
        assert running.engine.holds == {}


async def test_a_request_may_bypass_the_cache() -> None:
    async with world() as here:
        running = await here.worker()
        plan = CachePlan(enabled=False, checkpoint_at=None, capture_at=None, labels=(), reuse="prefill")
        await here.enqueue(make_request(clock=here.clock, cache=plan))
        assert (await here.terminal()).cache_decision == "bypass"
        assert here.broker.calls == []
        assert running.engine.captures == 0


async def test_a_fault_in_a_request_ends_it_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("services.gpu_worker.claimant.engine_requests", broken)
    async with world() as here:
        running = await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        failure = (await here.terminal()).failure
        assert failure is not None
        assert (failure.code, "bug" in failure.message) == ("internal_error", False)
        await until(lambda: here.waiting_items() == 0 and running.engine.at_baseline)


async def test_the_acknowledgement_comes_after_the_journalled_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the moment of the ack the journal must hold the terminal already."""
    from shared.transport.memory_stream import MemoryDelivery

    seen: list[bool] = []
    plain = MemoryDelivery.ack
    async with world() as here:

        async def ack(self: MemoryDelivery) -> None:
            last = here.server.streams[subjects.JOURNAL.name].last(subjects.tokens("r1"))
            seen.append(last is not None and isinstance(codec.decode(last.data), Terminal))
            await plain(self)

        monkeypatch.setattr(MemoryDelivery, "ack", ack)
        await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        await here.terminal()
        await until(lambda: here.waiting_items() == 0)
        assert seen == [True]


async def test_fr_94_a_request_by_claim_check_is_answered_as_one_that_came_whole() -> None:
    async with world() as here:
        here.server.max_payload_bytes = 8000
        prompt = tuple(range(100, 3100))
        whole = make_request(clock=here.clock, prompt=pack_tokens(prompt))
        await here.worker()
        subject = subjects.request_shared(FINGERPRINT, "normal", "t")
        data = await bodies.pack(here.transport, whole, {}, most_bytes=1 << 20, timeout=5)
        assert isinstance(codec.decode(data), ClaimCheck)
        await here.transport.append(subject, data)
        terminal = await here.terminal()
        assert terminal.prompt_tokens == 3000
        assert await here.tokens() == (stream(prompt, SEED, 20),)
        await until(lambda: here.waiting_items() == 0)


async def test_a_prompt_that_is_gone_is_looked_for_and_then_told_as_lost_and_kept_for_a_person() -> None:
    async with world() as here:
        here.server.max_payload_bytes = 8000
        request = make_request(clock=here.clock, prompt=pack_tokens(tuple(range(3000))))
        data = await bodies.pack(here.transport, request, {}, most_bytes=1 << 20, timeout=5)
        await bodies.forget(here.transport, "r1")
        await here.transport.append(subjects.request_shared(FINGERPRINT, "normal", "t"), data)
        running = await here.worker()
        abandoned = running.core.metrics.requests.labels("abandoned")._value
        for looks in (1, 2):
            await until(lambda looks=looks: abandoned.get() == looks)
            assert await here.journalled() == []
            here.clock.advance(2.0)
        terminal = await here.terminal()
        assert terminal.failure is not None
        assert (terminal.failure.code, terminal.failure.status) == ("body_lost", 500)
        assert "3 times" in terminal.failure.message
        kept = await here.transport.last(subjects.DEAD.name, subjects.dead(FINGERPRINT))
        assert kept is not None
        assert kept.headers[subjects.DEAD_REASON] == "body_lost"
        await until(lambda: here.waiting_items() == 0)


async def test_chunks_that_are_there_at_a_later_look_are_enough() -> None:
    async with world() as here:
        here.server.max_payload_bytes = 8000
        request = make_request(clock=here.clock, prompt=pack_tokens(tuple(range(100, 3100))))
        data = await bodies.pack(here.transport, request, {}, most_bytes=1 << 20, timeout=5)
        chunks = await here.transport.read(subjects.BODIES.name, subjects.body("r1"))
        await bodies.forget(here.transport, "r1")
        await here.transport.append(subjects.request_shared(FINGERPRINT, "normal", "t"), data)
        running = await here.worker()
        await until(lambda: running.core.metrics.requests.labels("abandoned")._value.get() == 1)
        for chunk in chunks:
            await here.transport.append(subjects.body("r1"), chunk.data)
        here.clock.advance(2.0)
        assert (await here.terminal()).failure is None
