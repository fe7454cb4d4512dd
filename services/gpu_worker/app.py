"""One worker process, from settings to exit: connect, load the model, work, drain.

connect -> health server (unready: "loading") -> load in the engine thread -> streams and consumers -> work
SIGTERM -> unready, pull no more, finish or hand back -> engine thread -> NATS -> spans
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final

from services.gpu_worker.api import EngineApi
from services.gpu_worker.broker import BrokerClient
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.core import Core, Identity, new_epoch
from services.gpu_worker.grammars import Grammars
from services.gpu_worker.host import EngineHost
from services.gpu_worker.metrics import EngineCollector, WorkerMetrics
from services.gpu_worker.worker import Worker
from shared.clock import SYSTEM
from shared.config import CommonSettings
from shared.health import Check, serve_health
from shared.lifecycle import Drain, Shutdown, drain_on_signals, keep_what_is_loaded
from shared.protocol import subjects
from shared.storing import StoreHealth
from shared.telemetry import Telemetry, setup
from shared.transport.access import Access
from shared.transport.base import Transport
from shared.transport.nats import connect

log = logging.getLogger(__name__)

_PROGRESS_S: Final = 5.0
_ENGINE_STOP_S: Final = 10.0


class Readiness:
    """Why the worker is not ready, in words; each part fills its own when it is there."""

    def __init__(self, transport: Transport, host: EngineHost) -> None:
        self._transport = transport
        self._host = host
        self.worker: Worker | None = None

    def checks(self) -> Mapping[str, Check]:
        return {
            "model": self._model,
            "nats": self._nats,
            "journal": self._journal,
            "progress": self._progress,
            "drain": self._drain,
        }

    async def _model(self) -> str | None:
        if not self._host.loaded:
            return "the model is not loaded"
        return None if self.worker is not None else "the queue is not ready"

    async def _nats(self) -> str | None:
        return None if await self._transport.ready() else "NATS cannot be reached"

    async def _journal(self) -> str | None:
        return self.worker.pulse.journal_fault if self.worker is not None else None

    async def _progress(self) -> str | None:
        if self.worker is not None and self.worker.pulse.stalled:
            return f"no progress for {self._host.quiet_s():.0f} s"
        return None

    async def _drain(self) -> str | None:
        return "draining" if self.worker is not None and self.worker.pulse.draining else None


async def run(
    settings: WorkerSettings, common: CommonSettings, *, build: Callable[[], EngineApi] | None = None
) -> None:
    """Work until a signal drains the process. `build` makes another engine than the settings say.

    Raises:
        TaskDied: a part of the worker ended; the process has to go down, its requests are delivered again.
        BurstlineError: NATS cannot be reached, or the model cannot be loaded.
    """
    async with drain_on_signals() as drain, Shutdown() as shutdown:
        telemetry = setup("worker", common)
        shutdown.push("telemetry", lambda: asyncio.to_thread(telemetry.shutdown))
        transport = await connect(
            common.nats_url, name=f"worker {settings.worker_id}", access=Access.of(common)
        )
        shutdown.push("nats", transport.close)
        host = EngineHost(build or (lambda: _build(settings)))
        shutdown.push("engine", lambda: host.stop(limit_s=_ENGINE_STOP_S), limit_s=_ENGINE_STOP_S + 1)
        telemetry.registry.register(EngineCollector(lambda: host.stats))
        readiness = Readiness(transport, host)
        async with AsyncExitStack() as stack:
            if settings.health_port:
                health = serve_health(
                    settings.health_port, readiness.checks(), telemetry.registry, host=settings.health_host
                )
                await stack.enter_async_context(health)
            if await _load(settings, host, drain):
                await _work(settings, transport, telemetry, host, readiness, drain)


def _build(settings: WorkerSettings) -> EngineApi:
    """Runs on the engine thread: torch is imported there, so that the loop answers probes meanwhile."""
    from services.gpu_worker.engine.engine import Engine

    engine = Engine(settings.engine_config(), settings.model_folder, limits=settings.engine_limits())
    for line in engine.memory.lines() if engine.memory else ():
        log.info("memory: %s", line)
    engine.runner.prepare(settings.speculation_k, log.info)
    return engine


async def _load(settings: WorkerSettings, host: EngineHost, drain: Drain) -> bool:
    """Build the engine, telling that it goes on. False when the process is to end before it is built."""
    start_ns = SYSTEM.monotonic_ns()
    log.info("loading %s from %s", settings.model_name, settings.model_folder)
    building = asyncio.create_task(host.start())
    draining = asyncio.create_task(drain.wait())
    try:
        while not building.done() and not drain.begun:
            await asyncio.wait((building, draining), timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            seconds = (SYSTEM.monotonic_ns() - start_ns) / 1e9
            log.info("loading %s: %s after %.1f s", settings.model_name, _word(building), seconds)
    finally:
        draining.cancel()
        if not building.done():
            building.cancel()
    if drain.begun:
        return False
    await building
    return True


def _word(building: asyncio.Task[None]) -> str:
    return "over" if building.done() else "going on"


async def _grammars(settings: WorkerSettings, vocab: int) -> Grammars:
    """What answers may have to follow; a model that no answer can be constrained of is served all the same."""
    grammars = Grammars(settings.model_folder, vocab)
    fault = await grammars.ready()
    if fault is not None:
        log.warning("no answer of %s can follow a grammar: %s", settings.model_name, fault)
    return grammars


async def _work(
    settings: WorkerSettings,
    transport: Transport,
    telemetry: Telemetry,
    host: EngineHost,
    readiness: Readiness,
    drain: Drain,
) -> None:
    engine = host.engine
    core = Core(
        settings=settings,
        identity=Identity(
            worker_id=settings.worker_id,
            epoch=new_epoch(),
            model=settings.model_name,
            fingerprint=engine.fingerprint,
        ),
        transport=transport,
        telemetry=telemetry,
        host=host,
        broker=BrokerClient(transport, telemetry, timeout_s=settings.broker_timeout_s),
        metrics=WorkerMetrics(telemetry.registry),
        storing=StoreHealth(SYSTEM, "the journal", hold_s=settings.journal_patience_s),
        grammars=await _grammars(settings, engine.dims.vocab),
        clock=SYSTEM,
        max_drafts=settings.max_drafts,
    )
    for stream in subjects.STREAMS:
        await transport.ensure_stream(stream)
    for durable in subjects.superseded_consumers(engine.fingerprint):
        await transport.drop_consumer(subjects.REQUESTS.name, durable)
    worker = Worker(core)
    readiness.worker = worker
    log.info("worker %s serves %s (%s)", settings.worker_id, settings.model_name, engine.fingerprint[:16])
    keep_what_is_loaded()  # all of torch: 0.1 s of a full collection, in the midst of a burst
    await worker.run(drain)
