"""The life of one generation: authenticate, read, validate, render, route, enqueue, answer. Both endpoints share it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from opentelemetry.trace import Span
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway import faults
from services.gateway.answer import Answer, Update
from services.gateway.body import ClientDisconnect, read_json_object
from services.gateway.connection import CallerGone, while_connected
from services.gateway.dispatch import Generation
from services.gateway.formats import Extras, Format
from services.gateway.middleware import RequestContext, context_of, send_json
from services.gateway.model import ServedModel
from services.gateway.resolve import Admission, budget, check_limits, resolve
from services.gateway.routing import Route
from services.gateway.schemas.fields import GenerationFields
from services.gateway.service import Gateway
from services.gateway.sse import EventNames, EventStream, event
from shared.errors import BurstlineError, InvalidRequest
from shared.protocol.messages import GenerateRequest, Identity, Priority
from shared.protocol.stream import Claimed, Emit, End

_log = logging.getLogger(__name__)
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


class GenerationResponse(Response):
    """Does all the work when it is called, because only then can it watch the caller's connection."""

    def __init__(
        self, gateway: Gateway, request: Request, schema: type[GenerationFields], form: type[Format]
    ) -> None:
        super().__init__()
        self._gateway: Final = gateway
        self._request: Final = request
        self._schema: Final = schema
        self._form: Final = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, context = self._gateway, context_of(scope)
        try:
            validated = await self._validate(context)
        except ClientDisconnect:
            raise CallerGone from None
        with gateway.slots.taken(validated.identity), gateway.metrics.in_flight.track_inprogress():
            run = _Run(gateway, context, validated, self._form)
            await while_connected(receive, run.answer(send))

    async def _validate(self, context: RequestContext) -> Validated:
        gateway, settings = self._gateway, self._gateway.settings
        with gateway.telemetry.span("auth", context.span) as span:
            identity = await gateway.authenticator.identify(self._request.headers.get("authorization"), span)
        context.span.set_attribute("burstline.tenant", identity.tenant)
        body = await read_json_object(self._request, settings.body_limits())
        fields = faults.validate(self._schema, body)
        model = gateway.model(fields.model, identity)
        check_limits(fields, model, settings)
        offered = body.get("tools") if getattr(fields, "offers_tools", False) else None
        return Validated(
            identity=identity,
            model=model,
            fields=fields,
            tools=offered,
            priority=self._priority(fields),
            deadline_s=self._deadline_s(),
        )

    def _priority(self, fields: GenerationFields) -> Priority:
        """The field, else the header, else normal."""
        if fields.priority is not None:
            return fields.priority
        named = self._request.headers.get("x-burstline-priority", "normal").lower()
        if named not in _PRIORITIES:
            raise InvalidRequest("x-burstline-priority is high, normal or low", param="x-burstline-priority")
        return _PRIORITIES[named]

    def _deadline_s(self) -> float:
        """The caller's own deadline in seconds, at most ours."""
        most = self._gateway.settings.request_deadline_s
        given = self._request.headers.get("x-burstline-deadline-s")
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

    def __init__(
        self, gateway: Gateway, context: RequestContext, validated: Validated, form: type[Format]
    ) -> None:
        self._gateway: Final = gateway
        self._context: Final = context
        self._validated: Final = validated
        self._form: Final = form
        self._first_token = True

    async def answer(self, send: Send) -> None:
        """Everything after validation; runs while the caller is connected."""
        request, route = await self._admit()
        gateway, validated, root = self._gateway, self._validated, self._context.span
        answer = Answer(request, validated.model, validated.fields)
        extras = Extras(
            trace_id=self._context.trace_id,
            route=route.reason,
            usage_chunk=validated.fields.usage_chunk,
            token_ids=bool(validated.fields.return_token_ids),
        )
        form = self._form(answer, validated.model.vocabulary, extras)
        async with gateway.dispatcher.open(request, route, root) as generation:
            with gateway.telemetry.span(
                "stream", root, {"burstline.streamed": validated.fields.streamed}
            ) as span:
                try:
                    if validated.fields.streamed:
                        await self._stream(send, generation, answer, form, span)
                    else:
                        await self._whole(send, generation, answer, form)
                finally:
                    self._tell(answer, generation)

    async def _admit(self) -> tuple[GenerateRequest, Route]:
        """Render, resolve and route. Everything here is refused before the queue knows of it."""
        gateway, context, validated = self._gateway, self._context, self._validated
        model, fields, root = validated.model, validated.fields, context.span
        prompt = await gateway.prompts.make(model, fields, tools=validated.tools, parent=root)
        budget(fields, len(prompt.tokens), model.window, gateway.settings)
        crew = await gateway.crew(model)
        admission = Admission(
            request_id=context.request_id,
            identity=validated.identity,
            model=model,
            prompt=prompt,
            crew=crew,
            created_ns=context.started_wall_ns,
            deadline_ns=context.started_wall_ns + int(validated.deadline_s * 1e9),
            priority=validated.priority,
        )
        request = resolve(fields, admission, gateway.settings)
        with gateway.telemetry.span("lookup", root) as span:
            route = await gateway.router.route(request, crew, span)
            span.set_attributes({"burstline.route": route.reason, "burstline.entry_position": route.position})
        gateway.metrics.routes.labels(route.reason).inc()
        root.set_attributes({"burstline.request_id": request.request_id, "burstline.model": request.model})
        return request, route

    async def _whole(self, send: Send, generation: Generation, answer: Answer, form: Format) -> None:
        async with aclosing(self._updates(generation, answer)) as updates:
            async for update in updates:
                form.add(update)
        await send_json(send, 200, form.whole())

    async def _stream(
        self, send: Send, generation: Generation, answer: Answer, form: Format, span: Span
    ) -> None:
        """Once the headers are out, an error is told in band and the stream still ends as streams do (FR-47)."""
        stream = EventStream(send, keep_alive_s=self._gateway.settings.keep_alive_s)
        await stream.open()
        try:
            async with aclosing(self._events(generation, answer, form)) as events:
                await stream.relay(events)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader must see an end (FR-47); it is logged
            known = error if isinstance(error, BurstlineError) else BurstlineError("internal error")
            span.add_event("cut", {"error.type": known.code})
            self._gateway.metrics.cut.labels(known.code).inc()
            _log.warning(
                "request %s: the stream was cut (%s)",
                self._context.request_id,
                known.code,
                exc_info=known is not error,
            )
            generation.cancel("operator")
            await stream.fail(faults.body(known))
        await stream.close()

    async def _events(self, generation: Generation, answer: Answer, form: Format) -> AsyncGenerator[bytes]:
        """SSE events. A finish waits for what follows it, so that the last one can carry the telemetry."""
        usage = self._validated.fields.usage_chunk
        held: tuple[str, dict[str, Any]] | None = None
        names = EventNames()
        async with aclosing(self._updates(generation, answer)) as updates:
            async for update in updates:
                if held is not None:
                    yield event(form.chunk(held[1]), name=held[0])
                    held = None
                for choice in form.chunks(update):
                    name = names.name(update.choice, update.position)
                    if choice["finish_reason"] is None:
                        yield event(form.chunk(choice), name=name)
                    else:
                        held = (name, choice)
        if held is not None:
            yield event(form.chunk(held[1], last=not usage), name=held[0])
        if usage:
            yield event(form.chunk(None, last=True))

    async def _updates(self, generation: Generation, answer: Answer) -> AsyncGenerator[Update]:
        """What happens to the answer; tells the worker about stop strings."""
        async with aclosing(generation.messages()) as messages:
            async for message in messages:
                match message:
                    case Claimed(started=started):
                        answer.started = answer.started or started
                    case Emit():
                        self._note_first_token()
                        update = answer.take(message)
                        if update is not None and update.finish is not None:
                            self._stop(generation, answer, update.choice)
                        if update is not None and answer.complete:
                            yield replace(update, finish=None)
                            await self._last_word(generation, answer)
                            yield replace(update, events=(), delivered=())
                            return
                        if update is not None:
                            yield update
                    case End(terminal=terminal):
                        for update in answer.end(terminal):
                            yield update

    def _stop(self, generation: Generation, answer: Answer, choice: int) -> None:
        offset = answer.stop_offset(choice)
        if offset is not None:
            generation.stop(None if answer.request.choices == 1 else choice, offset)
            generation.cancelled = generation.cancelled or answer.complete

    async def _last_word(self, generation: Generation, answer: Answer) -> None:
        """The reader has everything; the terminal would only add telemetry, so it is not waited for long."""
        terminal = await generation.terminal(self._gateway.settings.terminal_wait_s)
        if terminal is not None and terminal.failure is None:
            answer.terminal = terminal

    def _note_first_token(self) -> None:
        if self._first_token:
            self._first_token = False
            seconds = (self._gateway.clock.monotonic_ns() - self._context.started_ns) / 1e9
            self._gateway.metrics.first_token_seconds.labels(self._validated.model.name).observe(seconds)
            self._context.span.add_event("first_token", {"burstline.ttft_ms": seconds * 1e3})

    def _tell(self, answer: Answer, generation: Generation) -> None:
        """Figures of a generation, however it ended."""
        usage, model = answer.usage(), self._validated.model.name
        tokens = self._gateway.metrics.tokens
        for kind, count in (
            ("prompt", usage.prompt),
            ("cached", usage.cached),
            ("completion", usage.completion),
        ):
            tokens.labels(model, kind).inc(count)
        self._context.span.set_attributes(
            {
                "burstline.prompt_tokens": usage.prompt,
                "burstline.cached_tokens": usage.cached,
                "burstline.completion_tokens": usage.completion,
                "burstline.complete": answer.complete,
                "burstline.ended": generation.ended,
            }
        )
