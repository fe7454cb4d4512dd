"""A queue in memory, a scripted broker, and workers on scripted engines: the whole worker without a model or a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gpu_worker import journal
from services.gpu_worker.api import EngineApi
from services.gpu_worker.broker import BrokerClient
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.core import Core, Identity
from services.gpu_worker.grammars import Grammars
from services.gpu_worker.host import EngineHost
from services.gpu_worker.metrics import WorkerMetrics
from services.gpu_worker.worker import Worker
from shared import telemetry
from shared.clock import ManualClock
from shared.config import POCKET
from shared.lifecycle import Drain
from shared.protocol import codec, subjects
from shared.protocol.messages import (
    CachePlan,
    CancelRequest,
    Frame,
    GenerateRequest,
    NamespaceParts,
    PromptScores,
    Sampling,
    Speculation,
    Started,
    Terminal,
    pack_tokens,
)
from shared.storing import StoreHealth
from shared.transport.memory import MemoryServer, MemoryTransport
from tests.unit.services.gpu_worker.scripted import DIMS, FINGERPRINT, ScriptedBroker, ScriptedEngine
from tests.waiting import until

SEED = 7
PROMPT = tuple(range(100, 300))
SAMPLING = Sampling(
    seed=SEED, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
    frequency_penalty=0.0, logit_bias=(), min_tokens=0, allowed_ids=None, banned_ids=(),
)  # fmt: skip


def make_request(
    request_id: str = "r1", clock: ManualClock | None = None, **changes: object
) -> GenerateRequest:
    """A request of tenant `t`, 200 prompt tokens, 20 completion tokens."""
    now = (clock or ManualClock()).wall_ns()
    request = GenerateRequest(
        request_id=request_id, tenant="t", key_id="k", model="m",
        namespace=NamespaceParts(fingerprint=FINGERPRINT, adapter_digest="", tenant="t", salt=""),
        prompt=pack_tokens(PROMPT), choices=1, max_tokens=20, stop_ids=(), sampling=SAMPLING, top_logprobs=None, prompt_logprobs=None,
        cache=CachePlan(enabled=True, checkpoint_at=None, capture_at=None, labels=(), reuse="prefill"),
        speculation=Speculation(drafter="mtp", k=3), priority="normal", created_ns=now,
        deadline_ns=now + 600_000_000_000,
    )  # fmt: skip
    return replace_struct(request, changes)


def replace_struct(request: GenerateRequest, changes: dict[str, object]) -> GenerateRequest:
    import msgspec

    return msgspec.structs.replace(request, **changes)


@dataclass
class Running:
    """One worker at work."""

    worker: Worker
    core: Core
    engine: ScriptedEngine
    transport: MemoryTransport
    drain: Drain
    task: asyncio.Task[None]

    async def let_go(self, budget: int | None = None) -> None:
        """Allow the engine more steps."""

        def change(engine: object) -> None:
            self.engine.budget = budget

        await self.core.host.call(change)

    async def die(self) -> None:
        """As kill -9: nothing that it still does reaches anybody, and nothing is handed back."""
        self.transport.server = MemoryServer()
        self.transport.server.online = False
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.core.host.stop(limit_s=5)

    async def stop(self) -> None:
        if not self.task.done():
            self.drain.begin("the test is over")
        await asyncio.gather(self.task, return_exceptions=True)
        await self.core.host.stop(limit_s=5)


@dataclass
class World:
    clock: ManualClock
    server: MemoryServer
    transport: MemoryTransport
    broker: ScriptedBroker
    spans: InMemorySpanExporter
    telemetry: telemetry.Telemetry
    workers: list[Running] = field(default_factory=list)

    async def worker(
        self,
        worker_id: str = "w1",
        *,
        settings: dict[str, object] | None = None,
        real: EngineApi | None = None,
        **script: object,
    ) -> Running:
        """Start a worker; `script` sets fields of its engine, unless it is a `real` one."""
        engine: Any = real or ScriptedEngine(clock=self.clock, **script)  # type: ignore[arg-type]
        options = {
            "worker_id": worker_id,
            "pull_wait_s": 0.1,
            "queue_look_s": 0.02,
            "drain_limit_s": 0.5,
            "broker_timeout_s": 0.5,
        }
        config = WorkerSettings(**{**options, **(settings or {})})  # type: ignore[arg-type]
        transport = MemoryTransport(self.server)
        host = EngineHost(lambda: engine, clock=self.clock)
        await host.start()
        tele = telemetry.build("worker", None)
        core = Core(
            settings=config,
            identity=Identity(
                worker_id=worker_id,
                epoch=f"epoch-{len(self.workers)}",
                model="m",
                fingerprint=engine.fingerprint,
            ),
            transport=transport,
            telemetry=replace(self.telemetry, registry=tele.registry),
            host=host,
            broker=BrokerClient(transport, self.telemetry, timeout_s=config.broker_timeout_s),
            metrics=WorkerMetrics(tele.registry),
            storing=StoreHealth(self.clock, "the journal", hold_s=config.journal_patience_s),
            grammars=Grammars(POCKET, DIMS.vocab),
            clock=self.clock,
            max_drafts=7,
        )
        worker, drain = Worker(core), Drain()
        task = asyncio.create_task(worker.run(drain))
        running = Running(worker, core, engine, transport, drain, task)
        self.workers.append(running)
        return running

    async def enqueue(
        self, request: GenerateRequest, *, to: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        subject = (
            subjects.request_to(FINGERPRINT, to, request.tenant)
            if to
            else subjects.request_shared(FINGERPRINT, request.priority, request.tenant)
        )
        await self.transport.append(subject, codec.encode(request), headers=headers)

    async def cancel(self, request_id: str = "r1", *, reason: str = "client_disconnected", offset: int | None = None,
                     choice: int | None = None) -> None:  # fmt: skip
        message = CancelRequest(request_id=request_id, reason=reason, choice=choice, offset=offset)  # type: ignore[arg-type]
        await self.transport.append(subjects.cancel(request_id), codec.encode(message))

    async def journalled(self, request_id: str = "r1") -> list[Started | PromptScores | Frame | Terminal]:
        stored = await self.transport.read(subjects.JOURNAL.name, subjects.tokens(request_id))
        return [codec.decode(message.data) for message in stored]  # type: ignore[misc]

    async def claim(self, attempt: int, worker_id: str, expected: int, request_id: str = "r1") -> int:
        """As another worker: the sequence of its claim, which follows `expected`."""
        started = Started(
            request_id=request_id, attempt=attempt, worker_id=worker_id, fingerprint=FINGERPRINT, cached_tokens=0,
            resumed_offsets=(0,), resumed_scores=0, at_ns=attempt,
        )  # fmt: skip
        stored = await self.transport.append(
            subjects.tokens(request_id), codec.encode(started), expected_last_subject_sequence=expected
        )
        return stored.sequence

    async def said(self, count: int, request_id: str = "r1") -> None:
        """Wait until so many completion tokens are journalled, over all choices."""

        def enough() -> bool:
            stored = self.server.streams[subjects.JOURNAL.name].read(subjects.tokens(request_id), 0, 1000)
            messages = (codec.decode(one.data) for one in stored)
            return sum(len(one.tokens) // 4 for one in messages if isinstance(one, Frame)) >= count

        await until(enough)

    async def terminal(self, request_id: str = "r1") -> Terminal:
        """Wait for the end of a request, and check that it is the only one and the last."""

        def ended() -> bool:
            last = self.server.streams[subjects.JOURNAL.name].last(subjects.tokens(request_id))
            return last is not None and isinstance(codec.decode(last.data), Terminal)

        await until(ended)
        messages = await self.journalled(request_id)
        assert [isinstance(message, Terminal) for message in messages].count(True) == 1
        assert isinstance(messages[-1], Terminal)
        return messages[-1]

    async def tokens(self, request_id: str = "r1", choices: int = 1) -> tuple[tuple[int, ...], ...]:
        """The journalled tokens of each choice, folded as a reader does."""
        state = journal.empty(choices)
        for stored in await self.transport.read(subjects.JOURNAL.name, subjects.tokens(request_id)):
            state = journal.fold(state, stored.sequence, codec.decode(stored.data))  # type: ignore[arg-type]
        return state.tokens

    def waiting_items(self) -> int:
        """Work items that nobody acknowledged."""
        return len(list(self.server.streams[subjects.REQUESTS.name].after(0)))

    def finished_spans(self) -> list[ReadableSpan]:
        self.telemetry.provider.force_flush()
        return list(self.spans.get_finished_spans())


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Streams and a broker; workers are stopped at the end, and must have given everything back."""
    clock = ManualClock()
    server = MemoryServer(clock=clock)
    transport = MemoryTransport(server)
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    spans = InMemorySpanExporter()
    built = telemetry.build("worker", spans)
    broker = ScriptedBroker(transport)
    await broker.start()
    here = World(clock, server, transport, broker, spans, built)
    try:
        yield here
    finally:
        for running in here.workers:
            await running.stop()
        await broker.stop()
        await transport.close()
        built.shutdown()
