"""Calls to the cache broker, with the trace context along and every fault typed."""

from __future__ import annotations

from typing import Final, TypeVar

from services.gateway.faults import RemoteFailure
from shared.errors import ProtocolError, Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import BrokerCall, Reply
from shared.telemetry import Parent, Telemetry
from shared.transport.base import Transport

R = TypeVar("R", bound=Reply)


class Broker:
    """The gateway's side of `brk.v1.*`."""

    def __init__(self, transport: Transport, telemetry: Telemetry) -> None:
        self._transport: Final = transport
        self._telemetry: Final = telemetry

    async def call(self, call: BrokerCall, reply: type[R], *, timeout_s: float, parent: Parent) -> R:
        """One call.

        Raises:
            Unavailable: nobody answered in time, or the broker itself cannot do it now.
            RemoteFailure: the broker refused, with a 4xx of its own.
            ProtocolError: the answer is not one of ours.
        """
        headers = self._telemetry.headers(parent)
        data = await self._transport.request(
            subjects.broker(type(call)), codec.encode(call), timeout=timeout_s, headers=headers
        )
        answer = codec.decode(data)
        if isinstance(answer, Reply) and answer.failure is not None:
            if answer.failure.status >= 500:
                raise Unavailable("the cache broker cannot answer now")
            raise RemoteFailure(answer.failure)
        if not isinstance(answer, reply):
            raise ProtocolError(f"expected {reply.__name__}, got {type(answer).__name__}")
        return answer
