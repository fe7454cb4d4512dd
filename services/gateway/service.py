"""The gateway's parts, put together: what endpoints work with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags

from services.gateway.auth import Authenticator
from services.gateway.broker import Broker
from services.gateway.config import GatewaySettings
from services.gateway.dispatch import Dispatcher
from services.gateway.faults import RemoteFailure
from services.gateway.keys import Keys
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel, load_model
from services.gateway.prompts import PromptMaker
from services.gateway.queues import Queues
from services.gateway.routing import Router
from services.gateway.slots import Slots
from services.gateway.workers import Crew, Fleet, other_vocabulary
from shared.clock import SYSTEM, Clock
from shared.errors import BurstlineError, NotFound, PermissionRefused, Unavailable
from shared.health import Check
from shared.lifecycle import Supervisor
from shared.protocol.messages import Authenticate, Identity
from shared.protocol.subjects import BODIES, CANCELS, JOURNAL, REQUESTS
from shared.storing import StoreHealth
from shared.telemetry import Telemetry
from shared.transport.base import Transport

_log = logging.getLogger(__name__)
_STORE_FAULT_S: Final = 5.0
"""How long a request that could not be enqueued keeps this gateway unready."""


def load_models(settings: GatewaySettings) -> dict[str, ServedModel]:
    """Every model of the settings. Raises ModelFolderError."""
    return {name: load_model(name, folder) for name, folder in settings.model_folders().items()}


def read_vocabularies(models: Mapping[str, ServedModel]) -> None:
    """Read what grammars are walked over, before anything is served: it holds the interpreter, and so every stream. A model
    whose kind of tokenizer cannot be constrained is served all the same; requests that want a grammar are refused."""
    for name, model in models.items():
        start_ns = SYSTEM.monotonic_ns()
        fault = model.grammar_tokens.fault()
        if fault is not None:
            _log.warning("no answer of %s can follow a grammar: %s", name, fault)
        else:
            _log.info("read for grammars: %s, %.2f s", name, (SYSTEM.monotonic_ns() - start_ns) / 1e9)


class Gateway:
    """One gateway. Everything in it belongs to one event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        transport: Transport,
        telemetry: Telemetry,
        models: Mapping[str, ServedModel],
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.settings: Final = settings
        self.transport: Final = transport
        self.telemetry: Final = telemetry
        self.models: Final = models
        self.clock: Final = clock
        self.metrics: Final = Metrics(telemetry.registry)
        self.broker: Final = Broker(transport, telemetry)
        self.authenticator: Final = Authenticator(self.broker, telemetry, settings, clock)
        self.fleet: Final = Fleet(transport, clock, silence_s=settings.worker_silence_s)
        self.router: Final = Router(
            self.broker,
            telemetry,
            timeout_s=settings.lookup_timeout_s,
            max_waiting=settings.worker_max_waiting,
        )
        self.prompts: Final = PromptMaker(settings, telemetry, clock)
        self.queues: Final = Queues(
            transport,
            per_model=settings.max_queued_per_model,
            per_tenant=settings.max_queued_per_tenant,
            look_s=settings.queue_look_s,
        )
        self.storing: Final = StoreHealth(clock, "the queue", hold_s=_STORE_FAULT_S)
        self.dispatcher: Final = Dispatcher(
            transport, telemetry, settings, clock, self.fleet, self.queues, self.storing
        )
        self.keys: Final = Keys(self.broker, timeout_s=settings.broker_timeout_s)
        self.slots: Final = Slots(settings.max_in_flight, per_tenant=settings.max_in_flight_per_tenant)
        self.attached: Final = Slots(settings.max_in_flight)
        """Readers of requests that run already; a tenant at its limit may still come back to what it runs."""
        self.draining = False
        self._ending: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Streams exist and heartbeats are heard for the block; what runs in the background ends with it.

        Raises:
            TaskDied: the listening ended by itself; the process should end.
        """
        for spec in (REQUESTS, JOURNAL, CANCELS, BODIES):
            await self.transport.ensure_stream(spec)
        listening = asyncio.Event()
        try:
            async with Supervisor() as supervisor:
                supervisor.spawn("heartbeats", self.fleet.run(listening))
                supervisor.spawn("queues", self.queues.run())
                await listening.wait()
                yield
        finally:
            if self._ending is not None:
                self._ending.cancel()
            await self.dispatcher.close()
            await self.authenticator.close()
            self.prompts.close()

    def begin_end(self) -> None:
        """From now on what runs has the drain limit; then it ends with an error that its caller can read."""
        self._ending = asyncio.create_task(self._end(), name="end")

    async def _end(self) -> None:
        await asyncio.sleep(self.settings.drain_s)
        await self.dispatcher.abort()

    def model(self, name: str, identity: Identity) -> ServedModel:
        """A model that the key may use. Raises NotFound and PermissionRefused."""
        found = self.models.get(name)
        if found is None:
            raise NotFound(f"there is no model {name[:64]!r} here", param="model", code="model_not_found")
        if identity.models and name not in identity.models:
            raise PermissionRefused(f"this key may not use model {name!r}", param="model")
        return found

    async def crew(self, model: ServedModel) -> Crew:
        """The live workers of a model. Raises Unavailable, before anything is enqueued: there is none, or they read tokens
        otherwise than this gateway (another model folder under the same name)."""
        found = await self.fleet.wait_for_crew(model.name, grace_s=self.settings.no_worker_grace_s)
        if found is None:
            raise Unavailable(f"no live worker for model {model.name}", code="no_worker")
        if found.vocabulary_size != model.vocabulary.size:
            raise Unavailable(
                other_vocabulary(model.name, found, model.vocabulary.size), code="model_mismatch"
            )
        return found

    # readiness: one check a thing that a request needs

    def checks(self) -> dict[str, Check]:
        """What readiness asks."""
        return {
            "drain": self._drain,
            "nats": self._nats,
            "queue": self._queue,
            "broker": self._broker,
            "workers": self._workers,
        }

    async def _drain(self) -> str | None:
        return "draining" if self.draining else None

    async def _nats(self) -> str | None:
        return None if await self.transport.ready() else "no round trip to the server"

    async def _queue(self) -> str | None:
        return self.storing.fault

    async def _broker(self) -> str | None:
        """An unknown key is refused by a broker that lives and reaches its database."""
        try:
            await self.broker.call(
                Authenticate(key_digest="0" * 64), Identity, timeout_s=2.0, parent=_unsampled()
            )
        except RemoteFailure:
            return None
        except BurstlineError as error:
            return error.message
        return None

    async def _workers(self) -> str | None:
        sizes = {name: model.vocabulary.size for name, model in self.models.items()}
        return "; ".join(self.fleet.why_not(sizes)) or None


def _unsampled() -> SpanContext:
    """A parent that nobody records: a probe is no trace."""
    ids = RandomIdGenerator()
    return SpanContext(
        ids.generate_trace_id(), ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(0)
    )
