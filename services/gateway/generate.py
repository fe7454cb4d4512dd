"""The life of one generation: authenticate, read, validate, render, route, enqueue, tell. Both endpoints share it.

With an Idempotency-Key it may be another call's generation: then nothing is enqueued, and that one is told (again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Final

from starlette.types import Receive, Scope, Send

from services.gateway import faults
from services.gateway.body import ClientDisconnect, read_json_object
from services.gateway.connection import CallerGone, while_connected
from services.gateway.keys import Key, Mark, key_of, marks_of
from services.gateway.limits import check_limits
from services.gateway.middleware import RequestContext, context_of
from services.gateway.model import ServedModel
from services.gateway.resolve import Admission, budget, resolve
from services.gateway.resume import attach
from services.gateway.routing import Route
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.schemas.fields import GenerationFields
from services.gateway.service import Gateway
from services.gateway.several import Part, Several
from services.gateway.sheet import make_sheet
from services.gateway.telling import Telling
from services.gateway.workers import Crew
from shared.errors import InvalidRequest, NotFound, Overloaded, PayloadTooLarge, QuotaExceeded
from shared.protocol.messages import AnswerSheet, GenerateRequest, Identity, Priority

_LIMITS: Final = ("gateway_full", "concurrency_limit_exceeded", "queue_full", "tenant_queue_full")
_PRIORITIES: Final[dict[str, Priority]] = {"high": "high", "normal": "normal", "low": "low"}


@dataclass(frozen=True, kw_only=True)
class Validated:
    """A request that passed every check that needs no prompt."""

    identity: Identity
    model: ServedModel
    fields: GenerationFields
    tools: object
    priority: Priority
    deadline_s: float
    key: Key | None
    seen: dict[int, Mark] | None


def parts_of(fields: GenerationFields) -> Sequence[GenerationFields]:
    """A request for each prompt; a conversation is one."""
    return fields.parts() if isinstance(fields, CompletionRequest) else [fields]


class Generate:
    """Generations of one endpoint. Each is an ASGI call of its own, because only that can watch the caller's connection."""

    def __init__(self, gateway: Gateway, schema: type[GenerationFields]) -> None:
        self._gateway: Final = gateway
        self._schema: Final = schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the errors of a request of which nothing was told yet, and CallerGone."""
        gateway, context = self._gateway, context_of(scope)
        try:
            validated = await self._validate(context, scope["path"], receive)
        except ClientDisconnect:
            raise CallerGone from None
        run = _Run(gateway, context, validated)
        known = await run.known()
        if known is not None:
            with gateway.attached.taken(validated.identity):
                await while_connected(receive, run.tell_again(send, known))
            return
        parts = parts_of(validated.fields)
        try:
            with ExitStack() as held:
                for _ in parts:
                    held.enter_context(gateway.slots.taken(validated.identity))
                held.enter_context(gateway.metrics.in_flight.track_inprogress())
                answer = run.answer(send) if len(parts) == 1 else run.answer_several(send, parts)
                await while_connected(receive, answer)
        except (Overloaded, QuotaExceeded) as error:
            if error.code in _LIMITS:
                gateway.metrics.refused.labels(error.code).inc()
            raise

    async def _validate(self, context: RequestContext, path: str, receive: Receive) -> Validated:
        gateway, settings = self._gateway, self._gateway.settings
        authorization = context.headers.get("authorization")
        identity = await gateway.authenticator.identify(authorization, context.span)
        context.span.set_attribute("burstline.tenant", identity.tenant)
        body = await read_json_object(receive, context.headers, settings.body_limits())
        fields = faults.validate(self._schema, body)
        model = gateway.model(fields.model, identity)
        check_limits(fields, model, settings)
        key = key_of(context.headers.get("idempotency-key"), path, body)
        if key is not None and len(parts_of(fields)) > 1:
            raise InvalidRequest(
                "an Idempotency-Key stands for one request: give one prompt", param="Idempotency-Key"
            )
        seen = marks_of(context.headers.get("last-event-id"))
        if seen is not None and (key is None or not fields.streamed):
            raise InvalidRequest(
                "Last-Event-ID goes with an Idempotency-Key and stream: true", param="Last-Event-ID"
            )
        offered = body.get("tools") if getattr(fields, "offers_tools", False) else None
        return Validated(
            identity=identity,
            model=model,
            fields=fields,
            tools=offered,
            priority=self._priority(fields, context.headers),
            deadline_s=self._deadline_s(context.headers),
            key=key,
            seen=seen,
        )

    def _priority(self, fields: GenerationFields, headers: Mapping[str, str]) -> Priority:
        """The field, else the header, else normal."""
        if fields.priority is not None:
            return fields.priority
        named = headers.get("x-burstline-priority", "normal").lower()
        if named not in _PRIORITIES:
            raise InvalidRequest("x-burstline-priority is high, normal or low", param="x-burstline-priority")
        return _PRIORITIES[named]

    def _deadline_s(self, headers: Mapping[str, str]) -> float:
        """The caller's own deadline in seconds, at most ours."""
        most = self._gateway.settings.request_deadline_s
        given = headers.get("x-burstline-deadline-s")
        if given is None:
            return most
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= most:
            raise InvalidRequest(
                f"x-burstline-deadline-s is a number of seconds, over 0 and at most {most:g}",
                param="x-burstline-deadline-s",
            )
        return seconds


class _Run:
    """One generation, from its validated fields to its last byte."""

    def __init__(self, gateway: Gateway, context: RequestContext, validated: Validated) -> None:
        self._gateway: Final = gateway
        self._context: Final = context
        self._validated: Final = validated

    async def known(self) -> AnswerSheet | None:
        """The request that the caller's key stands for, if it has one that does.

        Raises:
            RemoteFailure: it stands for another body.
            NotFound: it stands for nothing, and the caller wants to go on reading.
            Unavailable: nobody can tell now.
        """
        validated = self._validated
        if validated.key is None:
            return None
        found = await self._gateway.keys.recall(validated.identity, validated.key, self._context.span)
        if found is None and validated.seen is not None:
            raise NotFound("there is no such stream, or not any more")
        return found

    async def tell_again(self, send: Send, sheet: AnswerSheet) -> None:
        """Nothing is enqueued: the request of the key runs, or has ended."""
        validated, fields = self._validated, self._validated.fields
        await attach(
            self._gateway,
            self._context,
            validated.identity,
            sheet,
            send,
            streamed=fields.streamed,
            usage_chunk=fields.usage_chunk,
            seen=validated.seen,
        )

    async def answer(self, send: Send) -> None:
        """Everything after validation; runs while the caller is connected."""
        request, crew = await self._resolve(self._validated.fields, self._context.request_id)
        gateway, validated, root = self._gateway, self._validated, self._context.span
        gateway.queues.admit(request.namespace.fingerprint, request.tenant)
        route = await gateway.router.route(request, crew, root)
        owner = None
        if validated.key is not None:
            other = await gateway.keys.remember(
                validated.identity, validated.key, self._sheet(request, route), root
            )
            if other is not None:  # the same key came in at the same time
                await self.tell_again(send, other)
                return
            owner = gateway.keys.owner(validated.identity, request.request_id, root)
        enqueued = False
        try:
            async with gateway.dispatcher.open(request, route, root, keyed=owner) as generation:
                enqueued = True
                self._routed(request, route)
                fields = validated.fields
                telling = Telling(
                    gateway,
                    self._context,
                    self._sheet(request, route),
                    validated.model,
                    usage_chunk=fields.usage_chunk,
                )
                await telling.tell(send, generation, streamed=fields.streamed)
        except (Overloaded, PayloadTooLarge):  # of the queue: nothing was stored
            if owner is not None and not enqueued:
                await owner.forget()
            raise
        finally:
            if not enqueued:
                self._routed(request, route)

    def _sheet(self, request: GenerateRequest, route: Route) -> AnswerSheet:
        return make_sheet(request, self._validated.fields, self._validated.model, route=route.reason)

    async def answer_several(self, send: Send, parts: Sequence[GenerationFields]) -> None:
        """The same for several prompts: all are decided before the first is on the queue, and there before it is told."""
        gateway, root, model = self._gateway, self._context.span, self._validated.model
        resolved = [
            await self._resolve(part, f"{self._context.request_id}-{place}")
            for place, part in enumerate(parts)
        ]
        first, _ = resolved[0]
        gateway.queues.admit(first.namespace.fingerprint, first.tenant, requests=len(parts))
        usage_chunk = self._validated.fields.usage_chunk
        async with AsyncExitStack() as opened:
            told = []
            for part, (request, crew) in zip(parts, resolved, strict=True):
                route = await gateway.router.route(request, crew, root)
                self._routed(request, route)
                sheet = make_sheet(request, part, model, route=route.reason)
                telling = Telling(gateway, self._context, sheet, model, usage_chunk=usage_chunk)
                generation = await opened.enter_async_context(gateway.dispatcher.open(request, route, root))
                told.append(Part(telling=telling, generation=generation))
            several = Several(gateway, self._context, told, usage_chunk=usage_chunk)
            await several.tell(send, streamed=self._validated.fields.streamed)

    async def _resolve(self, fields: GenerationFields, request_id: str) -> tuple[GenerateRequest, Crew]:
        """Render and decide every parameter. Everything here is refused before the queue knows of it."""
        gateway, context, validated = self._gateway, self._context, self._validated
        model = validated.model
        prompt = await gateway.prompts.make(model, fields, tools=validated.tools, parent=context.span)
        budget(fields, len(prompt.tokens), model.window, gateway.settings)
        grammar = await gateway.prompts.grammar(model, fields, tools=validated.tools, prompt=prompt)
        crew = await gateway.crew(model)
        admission = Admission(
            request_id=request_id,
            identity=validated.identity,
            model=model,
            prompt=prompt,
            crew=crew,
            created_ns=context.started_wall_ns,
            deadline_ns=context.started_wall_ns + int(validated.deadline_s * 1e9),
            priority=validated.priority,
            grammar=grammar,
        )
        return resolve(fields, admission, gateway.settings), crew

    def _routed(self, request: GenerateRequest, route: Route) -> None:
        """Tell where it went: once it is on its way there."""
        self._gateway.metrics.routes.labels(route.reason).inc()
        self._context.span.set_attributes(
            {
                "burstline.request_id": request.request_id,
                "burstline.model": request.model,
                "burstline.route": route.reason,
                "burstline.entry_position": route.position,
            }
        )
