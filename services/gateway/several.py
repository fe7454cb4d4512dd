"""Several prompts in one call: as many requests, on the queue together, told in their order as one answer.

Choices are numbered on over the prompts, usage is their sum, and the `burstline` block has one of each under `prompts`. A
request that fails ends all of it. Nobody can come back to such a call, so its events have no ids.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Send

from services.gateway.generation import Generation
from services.gateway.middleware import RequestContext, send_json
from services.gateway.service import Gateway
from services.gateway.sse import event
from services.gateway.telling import Telling, in_band


@dataclass(frozen=True, kw_only=True)
class Part:
    """One prompt's request, on the queue."""

    telling: Telling
    generation: Generation


class Several:
    """One telling of all parts."""

    def __init__(
        self, gateway: Gateway, context: RequestContext, parts: Sequence[Part], *, usage_chunk: bool
    ) -> None:
        self._gateway: Final = gateway
        self._context: Final = context
        self._parts: Final = tuple(parts)
        self._usage_chunk: Final = usage_chunk

    async def tell(self, send: Send, *, streamed: bool) -> None:
        """All of it, to its end."""
        attributes = {"burstline.streamed": streamed, "burstline.prompts": len(self._parts)}
        with self._gateway.telemetry.span("stream", self._context.span, attributes) as span:
            try:
                if streamed:
                    await in_band(self._gateway, self._context, span, send, self._events(), self._fail)
                else:
                    await send_json(send, 200, await self._whole())
            finally:
                for part in self._parts:
                    part.telling.account(part.generation)

    def _fail(self, error: BaseException) -> None:
        for part in self._parts:
            part.generation.fail(error)

    async def _whole(self) -> dict[str, Any]:
        answers = [await part.telling.whole(part.generation) for part in self._parts]
        choices = [choice for answer in answers for choice in answer["choices"]]
        return answers[0] | {
            "choices": [choice | {"index": index} for index, choice in enumerate(choices)],
            "usage": summed([answer["usage"] for answer in answers]),
            "burstline": self._block([answer["burstline"] for answer in answers]),
        }

    async def _events(self) -> AsyncGenerator[bytes]:
        """SSE events. The very last one carries the telemetry, so each waits for the next."""
        form, held = self._parts[0].telling.form, None
        async with aclosing(self._choices()) as choices:
            async for choice in choices:
                if held is not None:
                    yield event(form.chunk(held))
                held = choice
        last: dict[str, Any] = {
            "burstline": self._block([part.telling.form.telemetry() for part in self._parts])
        }
        if not self._usage_chunk:
            yield event(form.chunk(held) | last)
            return
        yield event(form.chunk(held))
        usage = summed([part.telling.form.usage() for part in self._parts])
        yield event(form.chunk(None) | {"usage": usage} | last)

    async def _choices(self) -> AsyncGenerator[dict[str, Any]]:
        first = 0
        for part in self._parts:
            async with aclosing(part.telling.named(part.generation)) as chunks:
                async for told in chunks:
                    for _, choice in told:
                        yield choice | {"index": first + choice["index"]}
            first += part.telling.choices

    def _block(self, blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"trace_id": self._context.trace_id, "prompts": list(blocks)}


def summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Usage of all together, member by member."""
    first = usages[0]
    return {
        name: summed([usage[name] for usage in usages])
        if isinstance(value, dict)
        else sum(usage[name] for usage in usages)
        for name, value in first.items()
    }
