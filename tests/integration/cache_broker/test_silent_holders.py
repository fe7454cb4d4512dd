"""An entry whose holder is silent gives way to a living worker that publishes it, at once and with its books."""

from __future__ import annotations

from services.cache_broker import presence
from shared.protocol.messages import Heartbeat, Speculation
from tests.integration.cache_broker.bench import FINGERPRINT, Bench, key


async def _beat(bench: Bench, worker: str, epoch: str) -> None:
    beat = Heartbeat(
        worker_id=worker, epoch=epoch, model="m", fingerprint=FINGERPRINT, vocabulary_size=1, max_context=1,
        speculation=Speculation(drafter="none", k=0), ready=True, draining=False, running=0, waiting=0,
        free_blocks=0, total_blocks=0, at_ns=bench.clock.wall_ns(),
    )  # fmt: skip
    now = bench.clock.now()
    await bench.database.run(lambda connection: presence.note(connection, beat, now=now))


async def _silence_of_the_first(bench: Bench, seconds: float, *, hearing: bool = True) -> None:
    """Time passes in which the second worker alone is heard."""
    for _ in range(round(seconds / 2)):
        bench.clock.advance(2)
        await _beat(bench, "w2", "e2")
        bench.hearing.tick(heard=hearing)


async def _tree(bench: Bench) -> str:
    """Three entries of w1, one upon another, the lowest leased by it; and one of another tenant."""
    tenant, other = await bench.tenant(), await bench.tenant("other")
    for worker, epoch in (("w1", "e1"), ("w2", "e2")):
        await _beat(bench, worker, epoch)
    await bench.publish(tenant, "a")
    await bench.publish(tenant, "b", parent=key("a"), parent_position=64, position=128)
    await bench.publish(tenant, "c", parent=key("b"), parent_position=128, position=192)
    await bench.publish(other, "a")
    assert (await bench.lease(tenant, "a", ttl_s=120)).reason == "granted"
    return tenant


def _as_second(bench: Bench) -> Bench:
    bench.worker, bench.epoch = "w2", "e2"
    return bench


async def test_an_entry_of_a_silent_worker_gives_way_with_all_that_stands_on_it(bench: Bench) -> None:
    tenant = await _tree(bench)
    await _silence_of_the_first(bench, bench.settings.alive_after_s + 2)
    reply = await _as_second(bench).reserve(tenant, "a")
    assert reply.decision == "granted"
    assert await bench.balanced() == {"acme": 100, "other": 100}
    await bench.commit(reply.reservation_id)
    assert (await bench.lookup(tenant, "a", "b", "c")).entry.workers == ("w2",)
    # What the dead worker held for others is swept as ever.
    await bench.sweeper.drop_orphans()
    assert await bench.balanced() == {"acme": 100, "other": 0}


async def test_the_silent_worker_is_told_that_its_epoch_is_over(bench: Bench) -> None:
    tenant = await _tree(bench)
    await _silence_of_the_first(bench, bench.settings.alive_after_s + 2)
    assert (await _as_second(bench).reserve(tenant, "a")).decision == "granted"
    bench.worker, bench.epoch = "w1", "e1"
    await _beat(bench, "w1", "e1")
    assert (await bench.reserve(tenant, "d")).failure.code == "epoch_gone"  # type: ignore[union-attr]
    await _beat(bench, "w1", "e1-anew")
    bench.epoch = "e1-anew"
    assert (await bench.reserve(tenant, "d")).decision == "granted"
    assert await bench.balanced() == {"acme": 200, "other": 100}


async def test_a_worker_that_is_heard_keeps_its_entry(bench: Bench) -> None:
    tenant = await _tree(bench)
    await _silence_of_the_first(bench, bench.settings.alive_after_s - 2)
    assert (await _as_second(bench).reserve(tenant, "a")).decision == "exists"
    assert (await bench.lookup(tenant, "a", "b", "c")).entry.workers == ("w1",)


async def test_nobody_loses_an_entry_while_the_broker_could_not_hear(bench: Bench) -> None:
    tenant = await _tree(bench)
    await _silence_of_the_first(bench, 60, hearing=False)
    assert (await _as_second(bench).reserve(tenant, "a")).decision == "exists"


async def test_a_restarted_workers_old_entry_gives_way_before_the_sweep(bench: Bench) -> None:
    tenant = await _tree(bench)
    bench.clock.advance(1)
    await _beat(bench, "w1", "e1-anew")
    assert (await _as_second(bench).reserve(tenant, "a")).decision == "granted"
    assert (await bench.balanced())["acme"] == 100
