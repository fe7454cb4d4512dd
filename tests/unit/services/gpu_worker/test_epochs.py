"""A worker whose epoch the broker declared over gives back what it held, begins anew, and goes on caching."""

from __future__ import annotations

import pytest

from shared.protocol import codec, subjects
from shared.protocol.messages import Heartbeat, Reserve, Withdraw
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import stream


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gpu_worker.epochs._PAUSES_S", (0.0, 0.0))


async def _one(here: World, request_id: str) -> None:
    await here.enqueue(make_request(request_id, clock=here.clock))
    await here.terminal(request_id)
    assert await here.tokens(request_id) == (stream(PROMPT, SEED, 20),)


def _lost(running: Running) -> float:
    return running.core.metrics.epochs._value.get()


async def test_a_refused_epoch_ends_and_the_next_one_caches() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        assert len(running.engine.entries) == 1
        here.broker.over.add("epoch-0")
        beats = await here.transport.subscribe(subjects.heartbeat("w1"))
        running.worker.epochs.doubt()
        await until(lambda: _lost(running) == 1)
        assert running.engine.entries == {}
        assert running.worker.evictor.owed == 0
        epoch = running.core.identity.epoch
        assert epoch != "epoch-0"
        while (beat := await beats.next(5.0)) is not None:  # it is told
            if codec.decode_as(Heartbeat, beat.data).epoch == epoch:
                break
        assert beat is not None
        await _one(here, "r2")
        published = here.broker.asked(Reserve)[-1]
        assert isinstance(published, Reserve)
        assert published.epoch == epoch
        assert len(running.engine.entries) == 1
        assert _lost(running) == 1


async def test_a_refused_reservation_raises_the_doubt() -> None:
    async with world() as here:
        running = await here.worker()
        here.broker.over.add("epoch-0")
        await _one(here, "r1")
        await until(lambda: _lost(running) == 1)
        assert running.core.metrics.captures.labels("epoch_gone")._value.get() == 1
        await _one(here, "r2")
        assert len(running.engine.entries) == 1


async def test_a_silence_alone_costs_nothing() -> None:
    """After an outage of the queue nobody was declared dead: the broker is asked, and the entries stay."""
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        here.clock.advance(3 * running.core.settings.heartbeat_s + 1)
        await running.worker.pulse.beat()
        await until(lambda: Withdraw(worker_id="w1", epoch="epoch-0", keys=()) in here.broker.calls)
        assert (len(running.engine.entries), _lost(running)) == (1, 0)
        assert running.core.identity.epoch == "epoch-0"


async def test_a_short_pause_asks_nobody() -> None:
    async with world() as here:
        running = await here.worker()
        await running.worker.pulse.beat()
        here.clock.advance(2 * running.core.settings.heartbeat_s)
        await running.worker.pulse.beat()
        await _one(here, "r1")
        assert here.broker.asked(Withdraw) == []


async def test_a_heartbeat_on_its_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was just started may ask before its first heartbeat is noted: nothing is lost."""
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        here.broker.over.add("epoch-0")
        beat = running.worker.epochs._beat

        async def noted() -> None:
            await beat()
            here.broker.over.clear()

        monkeypatch.setattr(running.worker.epochs, "_beat", noted)
        running.worker.epochs.doubt()
        await until(lambda: len(here.broker.asked(Withdraw)) == 2)
        assert (len(running.engine.entries), _lost(running)) == (1, 0)


async def test_what_is_in_use_is_given_back_when_its_use_ends() -> None:
    async with world() as here:
        running = await here.worker()
        await _one(here, "r1")
        (key,) = running.engine.entries
        running.engine.pinned.add(key)
        here.broker.over.add("epoch-0")
        running.worker.epochs.doubt()
        await until(lambda: _lost(running) == 1)
        assert list(running.engine.entries) == [key]
        running.engine.pinned.clear()
        await until(lambda: running.engine.entries == {})
