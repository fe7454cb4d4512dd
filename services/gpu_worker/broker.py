"""Calls to the cache broker: typed, bounded in time, and a fault is one error that the caller turns into a miss (C3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from opentelemetry.trace import SpanKind

from shared.errors import BurstlineError, ProtocolError, Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import BrokerCall, Failure, Reply
from shared.telemetry import Parent, Telemetry, fail
from shared.transport.base import Transport

R = TypeVar("R", bound=Reply)


class BrokerRefused(BurstlineError):
    """The broker answered with a failure: its code and message."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, code=failure.code)
        self.status = failure.status


class BrokerClient:
    """One RPC a call; every call is a client span under the given parent."""

    def __init__(self, transport: Transport, telemetry: Telemetry, *, timeout_s: float) -> None:
        self._transport = transport
        self._telemetry = telemetry
        self._timeout_s = timeout_s
        self.on_epoch_gone: Callable[[], None] = _nothing
        """Called whenever the broker refuses a call because this worker's epoch is over."""

    async def ask(self, call: BrokerCall, reply: type[R], parent: Parent = None) -> R:
        """The broker's answer.

        Raises:
            Unavailable: no answer in time, nobody listens, or the answer is not a `reply`.
            BrokerRefused: the broker answered with a failure.
        """
        subject = subjects.broker(type(call))
        with self._telemetry.span(f"rpc {subject}", parent, kind=SpanKind.CLIENT) as span:
            data = await self._transport.request(
                subject, codec.encode(call), timeout=self._timeout_s, headers=self._telemetry.headers(span)
            )
            try:
                answer = codec.decode_as(reply, data)
            except ProtocolError as error:
                raise Unavailable(f"the broker's answer is not a {reply.__name__}") from error
            if answer.failure is not None:
                refused = BrokerRefused(answer.failure)
                fail(span, refused)
                if refused.code == "epoch_gone":
                    self.on_epoch_gone()
                raise refused
            return answer


def _nothing() -> None:
    """Nobody minds."""
