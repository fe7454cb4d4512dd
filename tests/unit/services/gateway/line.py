"""The line around a gateway, scripted: the broker's answers, and a worker that journals what a test tells it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from msgspec import UNSET
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.app import create_app
from services.gateway.config import GatewaySettings
from services.gateway.model import ServedModel, load_model
from services.gateway.service import Gateway
from shared.clock import SYSTEM
from shared.config import POCKET
from shared.protocol import codec, subjects
from shared.protocol.messages import (
    Authenticate,
    CancelRequest,
    ChoiceEnd,
    Done,
    EntryRef,
    Failure,
    Find,
    FinishReason,
    Forget,
    Frame,
    GenerateRequest,
    Heartbeat,
    Identity,
    Lookup,
    LookupReply,
    Message,
    PromptScores,
    Recall,
    Remember,
    Remembered,
    SpecTelemetry,
    Speculation,
    Started,
    Terminal,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)
from shared.protocol.subjects import ConsumerSpec
from shared.telemetry import build
from shared.transport.base import Delivery, Received, Transport
from shared.transport.memory import MemoryServer, MemoryTransport
from tests.subjects import BROKER_CALLS

KEY = "bl_test-key"
OTHER_KEY = "bl_other-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
FINGERPRINT = "f" * 64
MODEL: ServedModel = load_model("pocket", POCKET)


def ids(text: str) -> list[int]:
    """Tokens of a text, control tokens included."""
    return MODEL.vocabulary.encode(MODEL.vocabulary.control.split(text))


def words(text: str, *, size: int = 1) -> list[list[int]]:
    """Tokens of a text as bursts of `size`."""
    tokens = ids(text)
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


class FakeBroker:
    """Answers what gateways ask."""

    def __init__(self) -> None:
        self.identities = {
            hashlib.sha256(KEY.encode()).hexdigest(): _identity("acme", "key-1"),
            hashlib.sha256(OTHER_KEY.encode()).hexdigest(): _identity("other", "key-2"),
        }
        self.entry: EntryRef | None = None
        self.calls: list[Message] = []
        self.failure: Failure | None = None
        self.delay_s = 0.0
        self.asked = asyncio.Event()
        self.ending = asyncio.Event()
        """Nobody waits for an answer any more."""
        self.bound: dict[tuple[str, str], Remember] = {}
        """(tenant, key) -> what binds it."""

    async def answer(self, message: Received) -> bytes:
        """One call."""
        call = codec.decode(message.data)
        self.calls.append(call)
        self.asked.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ending.wait(), self.delay_s)
        match call:
            case Authenticate(key_digest=digest):
                refused = Failure(code="invalid_api_key", message="no", status=401, retry_after_s=None)
                unknown = _identity("", "", failure=refused)
                known = self.identities.get(digest, unknown)
                return codec.encode(
                    known if self.failure is None else _identity("", "", failure=self.failure)
                )
            case Lookup():
                return codec.encode(LookupReply(failure=self.failure, entry=self.entry))
            case Remember() | Recall() | Find() | Forget():
                return codec.encode(self._by_key(call))
            case _:
                raise AssertionError(type(call))

    def _by_key(self, call: Remember | Recall | Find | Forget) -> Remembered | Done:
        if self.failure is not None:
            return Remembered(failure=self.failure, request_id=None, sheet=b"", new=False)
        if isinstance(call, Find | Forget):
            mine = {place: one for place, one in self.bound.items() if one.request_id == call.request_id}
            found = [one for (tenant, _), one in mine.items() if tenant == call.tenant]
            if isinstance(call, Forget):
                self.bound = {place: one for place, one in self.bound.items() if one not in found}
                return Done(failure=None)
            missing = Failure(code="not_found", message="no", status=404, retry_after_s=None)
            return _remembered(found[0]) if found else _remembered(None, failure=missing)
        known = self.bound.get((call.tenant, call.key))
        if known is not None and known.body != call.body:
            reused = Failure(code="idempotency_key_reused", message="no", status=409, retry_after_s=None)
            return _remembered(None, failure=reused)
        if known is None and isinstance(call, Remember):
            self.bound[call.tenant, call.key] = call
            return _remembered(call, new=True)
        return _remembered(known)


def _remembered(bound: Remember | None, *, new: bool = False, failure: Failure | None = None) -> Remembered:
    request, sheet = (None, b"") if bound is None else (bound.request_id, bound.sheet)
    return Remembered(failure=failure, request_id=request, sheet=sheet, new=new)


def _identity(tenant: str, key_id: str, *, failure: Failure | None = None) -> Identity:
    return Identity(failure=failure, tenant=tenant, key_id=key_id, models=(), max_concurrent=None)


class Work:
    """One request at the worker."""

    def __init__(self, worker: FakeWorker, delivery: Delivery) -> None:
        self.worker = worker
        self.message = delivery.message
        self.request = codec.decode_as(GenerateRequest, delivery.message.data)
        self.cancels: list[CancelRequest] = []
        self.cancelled = asyncio.Event()
        self.emitted = [0] * self.request.choices
        self.scored = 0
        self.attempt = 1

    async def append(self, message: Started | PromptScores | Frame | Terminal) -> None:
        """Journal a message; readers see it live as well."""
        await self.worker.transport.append(subjects.tokens(self.request.request_id), codec.encode(message))

    async def start(self, *, cached: int = 0) -> None:
        """Claim."""
        await self.append(
            Started(
                request_id=self.request.request_id,
                attempt=self.attempt,
                worker_id=self.worker.worker_id,
                fingerprint=FINGERPRINT,
                cached_tokens=cached,
                resumed_offsets=tuple(self.emitted),
                resumed_scores=self.scored,
                at_ns=SYSTEM.wall_ns(),
            )
        )

    async def score(self, count: int | None = None) -> None:
        """The next `count` log probabilities of the prompt, all by default: token p is worth -p / 8, and so are the likeliest
        ones, by ids from 2000 + p on."""
        prompt, most = unpack_tokens(self.request.prompt), self.request.prompt_logprobs
        if most is None:
            return
        end = len(prompt) - 1 if count is None else self.scored + count
        entries = tuple(
            TokenLogprobs(
                token=prompt[place + 1],
                logprob=-(place + 1) / 8,
                top=tuple((2001 + place + rank, -(place + 1) / 8 - rank) for rank in range(most)),
            )
            for place in range(self.scored, end)
        )
        if entries:
            await self.append(
                PromptScores(
                    request_id=self.request.request_id,
                    attempt=self.attempt,
                    offset=self.scored,
                    entries=entries,
                )
            )
        self.scored = max(self.scored, end)

    async def burst(self, tokens: Sequence[int], choice: int = 0) -> None:
        """One frame."""
        wanted = self.request.top_logprobs
        logprobs = None
        if wanted is not None:
            logprobs = tuple(
                TokenLogprobs(token=token, logprob=-0.5, top=((token, -0.5),) * wanted) for token in tokens
            )
        await self.append(
            Frame(
                request_id=self.request.request_id,
                attempt=self.attempt,
                choice=choice,
                offset=self.emitted[choice],
                tokens=pack_tokens(tokens),
                logprobs=logprobs,
            )
        )
        self.emitted[choice] += len(tokens)

    async def end(
        self,
        finish: FinishReason = "stop",
        *,
        failure: Failure | None = None,
        cancel_reason: str | None = None,
        cached: int = 0,
        drafts: bool = True,
        stop_id: int | None = 2,
        replayed: int = 0,
    ) -> None:
        """The terminal. A `stop` counts the end-of-turn token, which is not emitted; without one a last id was the end."""
        extra = 1 if finish == "stop" and stop_id is not None else 0
        ends = tuple(
            ChoiceEnd(
                choice=choice,
                finish=finish,
                completion_tokens=count + extra,
                emitted_tokens=count,
                stop_id=stop_id if extra else None,
                spec=SpecTelemetry(
                    rounds=max(1, count // 2),
                    drafted=count if drafts else 0,
                    accepted=count // 2 if drafts else 0,
                    replayed=replayed or UNSET,
                ),
            )
            for choice, count in enumerate(self.emitted)
        )
        request = self.request
        await self.append(
            Terminal(
                request_id=request.request_id,
                tenant=request.tenant,
                key_id=request.key_id,
                model=request.model,
                attempt=self.attempt,
                worker_id=self.worker.worker_id,
                ends=ends,
                failure=failure,
                cancel_reason=cancel_reason,
                prompt_tokens=len(request.prompt) // 4,
                scored_tokens=self.scored,
                cached_tokens=cached,
                completion_tokens=sum(end.completion_tokens for end in ends),
                cache_decision="hit" if cached else "miss",
                reuse="prefill",
                exact=True,
                queue_ns=1_000_000,
                prime_ns=2_000_000,
                decode_ns=3_000_000,
                at_ns=SYSTEM.wall_ns(),
            )
        )


Script = Callable[[Work], Awaitable[None]]


def says(text: str, *, size: int = 3, finish: FinishReason = "stop", cached: int = 0) -> Script:
    """A script that answers every choice with `text` in bursts of `size`."""

    async def script(work: Work) -> None:
        await work.start(cached=cached)
        await work.score()
        silent = work.request.max_tokens == 0
        for choice in range(work.request.choices):
            for burst in [] if silent else words(text, size=size):
                await work.burst(burst, choice)
        await work.end("length" if silent else finish, cached=cached)

    return script


async def until_cancelled(work: Work) -> None:
    """A script that streams one burst and then waits for its cancellation."""
    await work.start()
    await work.burst(ids("Hello"))
    await work.cancelled.wait()
    await work.end("cancelled", cancel_reason=work.cancels[0].reason)


@dataclass
class FakeWorker:
    """Pulls what is queued and runs `script` on it."""

    transport: Transport
    worker_id: str = "w1"
    script: Script = field(default_factory=lambda: says("Hello there."))
    works: list[Work] = field(default_factory=list)
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request has come."""
    ready: bool = True

    def heartbeat(self, **changes: Any) -> Heartbeat:
        """What it says of itself."""
        base: dict[str, Any] = {
            "worker_id": self.worker_id,
            "epoch": "e1",
            "model": "pocket",
            "fingerprint": FINGERPRINT,
            "vocabulary_size": 4096,
            "max_context": 4096,
            "speculation": Speculation(drafter="mtp", k=3),
            "ready": self.ready,
            "draining": False,
            "running": 0,
            "waiting": 0,
            "free_blocks": 10,
            "total_blocks": 10,
            "at_ns": SYSTEM.wall_ns(),
        }
        return Heartbeat(**(base | changes))

    async def run(self) -> None:
        """Until cancelled."""
        everything = ConsumerSpec(
            stream=subjects.REQUESTS.name,
            durable="workers",
            filter_subject=subjects.queued(FINGERPRINT),
            ack_wait_s=30,
            max_ack_pending=1024,
        )
        consumer = await self.transport.ensure_consumer(everything)
        cancels = await self.transport.subscribe("cxl.*")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear(cancels))
            group.create_task(self._pull(consumer, group))

    async def _pull(self, consumer: Any, group: asyncio.TaskGroup) -> None:
        while True:
            for delivery in await consumer.fetch(limit=8, timeout=60):
                group.create_task(self._serve(delivery))

    async def _serve(self, delivery: Delivery) -> None:
        work = Work(self, delivery)
        self.works.append(work)
        self.busy.set()
        await self.script(work)
        await delivery.ack()

    async def _hear(self, cancels: Any) -> None:
        async for message in cancels:
            cancel = codec.decode_as(CancelRequest, message.data)
            for work in self.works:
                if work.request.request_id == cancel.request_id:
                    work.cancels.append(cancel)
                    work.cancelled.set()


@dataclass
class Line:
    """Everything a test may touch."""

    gateway: Gateway
    app: Any
    client: httpx.AsyncClient
    broker: FakeBroker
    worker: FakeWorker
    server: MemoryServer
    spans: InMemorySpanExporter

    async def chat(self, **fields: Any) -> httpx.Response:
        """POST a conversation of one turn, unless the fields say otherwise."""
        body = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}]} | fields
        return await self.client.post("/v1/chat/completions", json=body)

    async def work(self) -> Work:
        """The first request, once the worker has it."""
        async with asyncio.timeout(10):
            await self.worker.busy.wait()
        return self.worker.works[0]

    async def complete(self, **fields: Any) -> httpx.Response:
        """POST a raw prompt."""
        return await self.client.post("/v1/completions", json={"model": "pocket", "prompt": "Hi"} | fields)


@asynccontextmanager
async def running_line(**settings: Any) -> AsyncIterator[Line]:
    """A gateway in the middle of its line."""
    server = MemoryServer()
    spans = InMemorySpanExporter()
    telemetry = build("gateway", None)
    telemetry.provider.add_span_processor(SimpleSpanProcessor(spans))
    gateway = Gateway(
        GatewaySettings(**({"no_worker_grace_s": 0} | settings)),
        MemoryTransport(server),
        telemetry,
        {"pocket": MODEL},
    )
    broker, worker = FakeBroker(), FakeWorker(MemoryTransport(server))
    side = MemoryTransport(server)
    app = create_app(gateway)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        gateway.running(),
        httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=HEADERS, timeout=30
        ) as client,
    ):
        await side.serve(BROKER_CALLS, subjects.BROKER_QUEUE, broker.answer, concurrency=64)
        gateway.fleet.note(worker.heartbeat())
        task = asyncio.create_task(worker.run())
        try:
            yield Line(gateway, app, client, broker, worker, server, spans)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            broker.ending.set()
            await side.close()
            telemetry.shutdown()
