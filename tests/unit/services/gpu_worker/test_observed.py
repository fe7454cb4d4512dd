"""What others see of a worker: heartbeats, readiness, metrics, and one trace a request."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import generate_latest
from pydantic import ValidationError

from services.gpu_worker.app import Readiness
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.engine.events import DrafterOff, DrafterOffReason, Parked
from services.gpu_worker.engine.limits import SpecGate
from services.gpu_worker.host import EngineHost
from services.gpu_worker.intake import Intake
from services.gpu_worker.metrics import EngineCollector
from shared.health import faults
from shared.protocol import codec, subjects
from shared.protocol.messages import Heartbeat
from shared.telemetry import trace_id
from shared.transport.memory import MemoryTransport
from tests.unit.services.gpu_worker.rig import make_request, until, world
from tests.unit.services.gpu_worker.scripted import DIMS, FINGERPRINT, ScriptedEngine


async def test_heartbeats_tell_the_worker_and_its_load() -> None:
    async with world() as here:
        beats = await here.transport.subscribe(subjects.HEARTBEATS)
        running = await here.worker(budget=1, settings={"heartbeat_s": 0.02})
        received = await beats.next(10)
        assert received is not None
        beat = codec.decode_as(Heartbeat, received.data)
        assert (beat.worker_id, beat.model, beat.fingerprint) == ("w1", "m", FINGERPRINT)
        assert (beat.vocabulary_size, beat.max_context) == (DIMS.vocab, 4096)
        assert (beat.ready, beat.draining, beat.running) == (True, False, 0)
        assert (beat.speculation.drafter, beat.speculation.k) == ("auto", 7)
        await here.enqueue(make_request(clock=here.clock))
        await until(lambda: running.worker.pulse.heartbeat().running == 1)


async def test_fr_123_readiness_has_reasons() -> None:
    async with world() as here:
        transport = MemoryTransport(here.server)
        empty = EngineHost(lambda: ScriptedEngine(clock=here.clock))
        readiness = Readiness(transport, empty)
        assert list(await faults(readiness.checks())) == ["model"]
        here.server.online = False
        assert list(await faults(readiness.checks())) == ["model", "nats"]
        here.server.online = True
        running = await here.worker()
        readiness = Readiness(transport, running.core.host)
        readiness.worker = running.worker
        assert await faults(readiness.checks()) == {}
        running.drain.begin("test")
        await running.task
        assert await faults(readiness.checks()) == {"drain": "draining"}


async def test_fr_123_a_stall_is_a_reason() -> None:
    import threading

    async with world() as here:
        stuck = threading.Event()
        running = await here.worker(stuck=stuck, settings={"stall_limit_s": 60.0, "heartbeat_s": 100.0})
        readiness = Readiness(here.transport, running.core.host)
        readiness.worker = running.worker
        await here.enqueue(make_request(clock=here.clock))
        await until(lambda: bool(running.engine.submitted))
        here.clock.advance(61)
        assert list(await faults(readiness.checks())) == ["progress"]
        stuck.set()
        await here.terminal()
        await until(lambda: not running.worker.pulse.stalled)


async def test_metrics_count_tokens_decisions_and_pools() -> None:
    async with world() as here:
        running = await here.worker()
        registry = running.core.telemetry.registry
        registry.register(EngineCollector(lambda: running.core.host.stats))
        await here.enqueue(make_request("r1", clock=here.clock))
        await here.terminal("r1")
        await here.enqueue(make_request("r2", clock=here.clock))
        await here.terminal("r2")
        await until(lambda: running.worker.room.taken == 0)
        text = generate_latest(registry).decode()
        for line in (
            "burstline_worker_tokens_total 40.0",
            "burstline_worker_cached_tokens_total 192.0",
            'burstline_worker_cache_decisions_total{decision="hit"} 1.0',
            'burstline_worker_requests_total{end="done"} 2.0',
            'burstline_worker_captures_total{outcome="published"} 1.0',
            'burstline_worker_pool{holder="free",pool="blocks"}',
            'burstline_worker_queue_depth{queue="normal"}',
            'burstline_worker_position_drafted_tokens_total{position="1"} 10.0',
            'burstline_worker_position_accepted_tokens_total{position="2"} 4.0',
            'burstline_worker_affinity_prompts_total{outcome="served"} 0.0',
            "burstline_worker_host_tier_bytes 0.0",
        ):
            assert line in text


async def test_one_trace_from_the_queue_to_the_broker() -> None:
    async with world() as here:
        running = await here.worker()
        with here.telemetry.span("http") as http:
            headers = here.telemetry.headers(http)
            await here.enqueue(make_request("r1", clock=here.clock), headers=headers)
            await here.terminal("r1")
            await here.enqueue(make_request("r2", clock=here.clock), headers=headers)
            await here.terminal("r2")
        await until(lambda: running.worker.room.taken == 0)
        spans = [
            one for one in here.finished_spans() if format(one.context.trace_id, "032x") == trace_id(http)
        ]
        names = {span.name for span in spans}
        assert names >= {
            "worker.request", "queue.wait", "cache.lookup", "cache.lease", "rpc brk.v1.lease", "cache.restore",
            "engine.queue", "engine.prime", "engine.burst", "cache.capture", "cache.publish", "rpc brk.v1.reserve",
            "rpc brk.v1.commit",
        }  # fmt: skip
        assert names == {span.name for span in here.finished_spans()}  # nothing is told outside the trace
        by_id = {span.context.span_id: span for span in spans}
        for span in spans:
            if span.name == "rpc brk.v1.reserve":
                assert span.parent is not None
                assert by_id[span.parent.span_id].name == "cache.publish"
            if span.name in ("engine.burst", "queue.wait", "cache.publish"):
                assert span.parent is not None
                assert by_id[span.parent.span_id].name == "worker.request"
        bursts = [span for span in spans if span.name == "engine.burst"]
        assert sum(span.attributes["burstline.tokens"] for span in bursts) == 40  # type: ignore[index, misc]


async def test_the_journal_and_the_broker_get_the_trace_too() -> None:
    async with world() as here:
        await here.worker()
        with here.telemetry.span("http") as http:
            await here.enqueue(make_request(clock=here.clock), headers=here.telemetry.headers(http))
            await here.terminal()
        wanted = trace_id(http)
        stored = await here.transport.read(subjects.JOURNAL.name, subjects.tokens("r1"))
        assert {trace_id(here.telemetry.extract(one.headers)) for one in stored} == {wanted}
        assert {trace_id(here.telemetry.extract(headers)) for headers in here.broker.headers} == {wanted}


@pytest.mark.parametrize(
    "bad",
    [
        {"worker_id": "a.b"},
        {"prefill_chunk": 100},
        {"max_batch": 9, "num_slots": 8},
        {"speculation_k": 8, "max_verify": 8},
        {"num_blocks": 4, "max_context": 4096},
        {"drafter": "oracle"},
        {"spec_low": 4, "spec_high": 4},
        {"spec_least_gain": 1.0},
    ],
)
def test_settings_that_cannot_work_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        WorkerSettings(**bad)  # type: ignore[arg-type]


def test_settings_make_the_engine_s_configuration() -> None:
    settings = WorkerSettings(num_blocks=100, max_context=640, drafter="none")
    assert settings.engine_config().num_blocks == 100
    assert settings.max_drafts == 0
    assert settings.engine_limits().spec_gate == SpecGate(low=2, high=4, least_gain=1.1)
    assert WorkerSettings(spec_least_gain=0).engine_limits().spec_gate == SpecGate(low=2, high=4)
    assert WorkerSettings().worker_id != WorkerSettings().worker_id


async def test_many_streams_are_paced_and_lose_nothing() -> None:
    async with world() as here:
        running = await here.worker(settings={"pace_above": 2, "frame_interval_s": 5.0}, budget=0)
        for number in range(4):
            await here.enqueue(make_request(f"r{number}", clock=here.clock, max_tokens=60))
        await until(lambda: len(running.engine.submitted) == 4)
        assert running.worker._reception._busy.is_set()
        await running.let_go()
        async with asyncio.timeout(4):  # the end of a stream does not wait for the interval
            for number in range(4):
                await here.terminal(f"r{number}")
                assert len((await here.tokens(f"r{number}"))[0]) == 60


async def test_fr_22_a_lost_drafter_is_a_metric_a_span_and_for_a_useless_one_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as here:
        core = (await here.worker()).core
        with here.telemetry.span("worker.request") as span:
            intake = Intake(
                core, make_request(), "e1", span=span, on_capture=lambda _: None, on_restored=lambda: None
            )
            with caplog.at_level("WARNING", logger="services.gpu_worker.intake"):
                for reason in (DrafterOffReason.LOAD, DrafterOffReason.ACCEPTANCE):
                    off = DrafterOff(
                        request_id="e1",
                        choice=0,
                        drafter="mtp",
                        reason=reason,
                        tokens_per_verify=1.01,
                        end_ns=5,
                    )
                    intake.on_event(off)
                intake.on_event(Parked(request_id="e1", choice=0, retries=1, emitted=7, end_ns=6))
            intake.trace()
        assert [record.message for record in caplog.records] == [
            "drafter mtp is off for a choice of request r1: 1.01 tokens a verify"
        ]
        text = generate_latest(core.telemetry.registry).decode()
        for line in (
            'burstline_worker_drafters_off_total{drafter="mtp",reason="load"} 1.0',
            'burstline_worker_drafters_off_total{drafter="mtp",reason="acceptance"} 1.0',
            "burstline_worker_parked_streams_total 1.0",
        ):
            assert line in text
        spans = {one.name: one for one in here.finished_spans()}
        assert spans["engine.parked"].attributes["burstline.retries"] == 1  # type: ignore[index]
        told = spans["engine.drafter_off"]
        assert told.attributes["burstline.reason"] in ("load", "acceptance")  # type: ignore[index]
