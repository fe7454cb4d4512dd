"""A generation told to one reader: as a stream of events or as one object, from its beginning or from where the reader is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from opentelemetry.trace import Span
from starlette.types import Send

from services.gateway import faults
from services.gateway.answer import Answer, Update
from services.gateway.chat_format import ChatFormat
from services.gateway.formats import Extras
from services.gateway.generation import Generation
from services.gateway.keys import Mark
from services.gateway.middleware import RequestContext, send_json
from services.gateway.model import ServedModel
from services.gateway.reader import News
from services.gateway.service import Gateway
from services.gateway.sse import EventNames, EventStream, event
from services.gateway.text_format import TextFormat
from shared.errors import BurstlineError
from shared.protocol.messages import AnswerSheet
from shared.protocol.stream import Claimed, Emit, End, Scored

_log = logging.getLogger(__name__)


async def in_band(
    gateway: Gateway,
    context: RequestContext,
    span: Span,
    send: Send,
    events: AsyncGenerator[bytes],
    cut: Callable[[BaseException], None],
) -> None:
    """Stream `events`. Once the headers are out, an error is told in band, and to `cut`, and the stream still ends as
    streams do (FR-47)."""
    stream = EventStream(send, keep_alive_s=gateway.settings.keep_alive_s)
    await stream.open()
    try:
        async with aclosing(events):
            await stream.relay(events)
    except Exception as error:  # noqa: BLE001 - whatever it is, the reader must see an end (FR-47); it is logged
        known = error if isinstance(error, BurstlineError) else BurstlineError("internal error")
        span.add_event("cut", {"error.type": known.code})
        gateway.metrics.cut.labels(known.code).inc()
        _log.warning(
            "request %s: the stream was cut (%s)",
            context.request_id,
            known.code,
            exc_info=known is not error,
        )
        cut(error)
        await stream.fail(faults.body(known))
    await stream.close()


class Telling:
    """One telling. `seen`: choice -> the last event that the reader has. `again`: the request was enqueued by another call,
    so it counts in no figure."""

    def __init__(
        self,
        gateway: Gateway,
        context: RequestContext,
        sheet: AnswerSheet,
        model: ServedModel,
        *,
        usage_chunk: bool,
        seen: Mapping[int, Mark] | None = None,
        again: bool = False,
    ) -> None:
        self._gateway: Final = gateway
        self._context: Final = context
        self._model: Final = model
        self._usage_chunk: Final = usage_chunk
        self._seen: Final = seen
        self._again: Final = again
        cuts = {choice: token for choice, (token, _) in (seen or {}).items()}
        self._answer: Final = Answer(sheet, model, cuts=cuts)
        extras = Extras(
            trace_id=context.trace_id,
            route=sheet.route,
            usage_chunk=usage_chunk,
            token_ids=sheet.token_ids,
        )
        form = ChatFormat if sheet.chat else TextFormat
        self.form: Final = form(self._answer, model.vocabulary, extras)
        self.choices: Final = sheet.request.choices
        self._first_token = not again

    async def tell(self, send: Send, generation: Generation, *, streamed: bool) -> None:
        """All of it, to its end."""
        with self._gateway.telemetry.span(
            "stream", self._context.span, {"burstline.streamed": streamed, "burstline.attached": self._again}
        ) as span:
            try:
                if streamed:
                    await self._stream(send, generation, span)
                else:
                    await send_json(send, 200, await self.whole(generation))
            finally:
                self.account(generation)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The whole answer, once it is there. Raises what the generation raises."""
        async with aclosing(self._updates(generation)) as updates:
            async for update in updates:
                self.form.add(update)
        return self.form.whole()

    async def _stream(self, send: Send, generation: Generation, span: Span) -> None:
        events = self._events(generation)
        await in_band(self._gateway, self._context, span, send, events, generation.fail)

    async def _events(self, generation: Generation) -> AsyncGenerator[bytes]:
        """SSE events, those of one update together. A finish waits for what follows it, so that the last one can carry the
        telemetry."""
        held: tuple[str, dict[str, Any]] | None = None
        form = self.form
        async with aclosing(self.named(generation)) as chunks:
            async for told in chunks:
                ready: list[bytes] = []
                for name, choice in told:
                    if held is not None:
                        ready.append(event(form.chunk(held[1]), name=held[0]))
                        held = None
                    if choice["finish_reason"] is None:
                        ready.append(event(form.chunk(choice), name=name))
                    else:
                        held = (name, choice)
                if ready:
                    yield b"".join(ready)
        if held is not None:
            yield event(form.chunk(held[1], last=not self._usage_chunk), name=held[0])
        if self._usage_chunk:
            yield event(form.chunk(None, last=True))

    async def named(self, generation: Generation) -> AsyncGenerator[list[tuple[str, dict[str, Any]]]]:
        """`choices` elements that the reader does not have, with their ids, those of one update together. The role comes before
        any token."""
        names = EventNames(self._seen)
        async with aclosing(self._updates(generation)) as updates:
            async for update in updates:
                told = []
                for choice in self.form.chunks(update):
                    opens = "role" in choice.get("delta", ())
                    name = names.name(update.choice, 0 if opens else update.position)
                    if name is not None:
                        told.append((name, choice))
                if told:
                    yield told

    async def _updates(self, generation: Generation) -> AsyncGenerator[Update]:
        """What happens to the answer. Over with its end, or as soon as stop strings have ended every choice."""
        answer = self._answer
        for update in answer.begin():
            yield update
        async with aclosing(generation.messages()) as messages:
            async for message in messages:
                updates = self._heard(generation, message)
                for update in updates[:-1]:
                    yield update
                complete = answer.complete and not isinstance(message, End)
                if complete:
                    await self._last_word(generation)
                if updates:
                    yield updates[-1]
                if complete:
                    return

    def _heard(self, generation: Generation, message: News) -> list[Update]:
        """One piece of news; tells the worker about stop strings."""
        answer = self._answer
        match message:
            case Claimed(started=started):
                answer.started = answer.started or started
                return []
            case Scored():
                return answer.score(message)
            case Emit():
                self._note_first_token()
                updates = answer.take(message)
                if updates and updates[-1].finish is not None:
                    self._stop(generation, message.choice)
                return updates
            case End(terminal=terminal):
                return answer.end(terminal)

    def _stop(self, generation: Generation, choice: int) -> None:
        answer = self._answer
        offset = answer.stop_offset(choice)
        if offset is not None:
            generation.stop(None if answer.request.choices == 1 else choice, offset)
            generation.cancelled = generation.cancelled or answer.complete

    async def _last_word(self, generation: Generation) -> None:
        """The reader has everything; the terminal would only add telemetry, so it is not waited for long."""
        terminal = await generation.terminal(self._gateway.settings.terminal_wait_s)
        if terminal is not None and terminal.failure is None:
            self._answer.terminal = terminal

    def _note_first_token(self) -> None:
        """How long it took; told when it is on its way to the reader."""
        if self._first_token:
            self._first_token = False
            seconds = (self._gateway.clock.monotonic_ns() - self._context.started_ns) / 1e9
            self._context.span.add_event("first_token", {"burstline.ttft_ms": seconds * 1e3})
            asyncio.get_running_loop().call_soon(self._observe_first_token, seconds)

    def _observe_first_token(self, seconds: float) -> None:
        self._gateway.metrics.first_token_seconds.labels(self._model.name).observe(seconds)

    def account(self, generation: Generation) -> None:
        """Figures of a generation, however it ended."""
        answer, model = self._answer, self._model.name
        usage = answer.usage()
        tokens = self._gateway.metrics.tokens
        for kind, count in (
            ("prompt", usage.prompt),
            ("cached", usage.cached),
            ("completion", usage.completion),
        ):
            tokens.labels(model, kind).inc(0 if self._again else count)
        self._context.span.set_attributes(
            {
                "burstline.prompt_tokens": usage.prompt,
                "burstline.cached_tokens": usage.cached,
                "burstline.completion_tokens": usage.completion,
                "burstline.complete": answer.complete,
                "burstline.ended": generation.ended,
            }
        )
