"""A caller who comes back: to a request that runs or has ended, which another call enqueued, perhaps at another gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.connection import while_connected
from services.gateway.keys import Mark, marks_of
from services.gateway.middleware import RequestContext, context_of
from services.gateway.service import Gateway
from services.gateway.telling import Telling
from shared.protocol.messages import AnswerSheet, Identity


async def attach(
    gateway: Gateway,
    context: RequestContext,
    identity: Identity,
    sheet: AnswerSheet,
    send: Send,
    *,
    streamed: bool,
    usage_chunk: bool,
    seen: Mapping[int, Mark] | None,
) -> None:
    """Tell the request of a sheet, from its beginning or from what the reader has `seen`.

    Raises:
        NotFound, PermissionRefused: the model is not served here any more, or not to this key.
        Unavailable: the queue is away.
    """
    request = sheet.request
    model = gateway.model(request.model, identity)
    context.request_id = request.request_id
    context.span.set_attributes({"burstline.request_id": request.request_id, "burstline.attached": True})
    telling = Telling(gateway, context, sheet, model, usage_chunk=usage_chunk, seen=seen, again=True)
    owner = gateway.keys.owner(identity, request.request_id, context.span)
    async with gateway.dispatcher.attach(request, owner) as generation:
        await telling.tell(send, generation, streamed=streamed)


class ResumeResponse(Response):
    """GET of a stream by its request's id."""

    def __init__(self, gateway: Gateway, request: Request, request_id: str) -> None:
        super().__init__()
        self._gateway: Final = gateway
        self._request: Final = request
        self._request_id: Final = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, context = self._gateway, context_of(scope)
        headers = self._request.headers
        identity = await gateway.authenticator.identify(headers.get("authorization"), context.span)
        context.span.set_attribute("burstline.tenant", identity.tenant)
        seen = marks_of(headers.get("last-event-id"))
        sheet = await gateway.keys.find(identity, self._request_id, context.span)
        with gateway.attached.taken(identity):
            work = attach(
                gateway,
                context,
                identity,
                sheet,
                send,
                streamed=True,
                usage_chunk=sheet.usage_chunk,
                seen=seen,
            )
            await while_connected(receive, work)
