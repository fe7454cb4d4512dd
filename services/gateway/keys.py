"""Idempotency-Key and Last-Event-ID: what callers send of them, and the broker's word on what a key stands for.

The broker gets digests alone. When it is away nobody knows whether a request with a key runs already, so such a request
is refused (503) and never run twice; requests without a key do not depend on it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from services.gateway.broker import Broker
from services.gateway.faults import RemoteFailure
from shared.errors import BurstlineError, InvalidRequest, NotFound, Unavailable
from shared.protocol import codec
from shared.protocol.messages import (
    AnswerSheet,
    Done,
    Find,
    Forget,
    Identity,
    Recall,
    Remember,
    Remembered,
)
from shared.telemetry import Parent

_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_MARK: Final = re.compile(r"\d{1,5}\.\d{1,9}\.\d{1,9}")
_REQUEST: Final = re.compile(r"[0-9a-f]{32}")
_MOST_MARKS: Final = 64
_TELLING: Final = ("stream", "stream_options")
"""Fields that decide how an answer is sent and not what it is: a key may be repeated with others."""

Mark = tuple[int, int]
"""Where a reader is in one choice: (token, sub-event) of its last event."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Digests of a caller's key and of what was asked with it."""

    key: str
    body: str


def key_of(header: str | None, path: str, body: Mapping[str, object]) -> Key | None:
    """The key of a request, None without the header. Raises InvalidRequest."""
    if header is None:
        return None
    if not _KEY.fullmatch(header):
        raise InvalidRequest(
            "Idempotency-Key is 1 to 255 printable ASCII characters", param="Idempotency-Key"
        )
    asked = {name: value for name, value in body.items() if name not in _TELLING}
    data = path.encode() + b"\n" + msgspec.json.encode(asked, order="deterministic")
    return Key(key=hashlib.sha256(header.encode()).hexdigest(), body=hashlib.sha256(data).hexdigest())


def marks_of(header: str | None) -> dict[int, Mark] | None:
    """Choice -> where its reader is, of a Last-Event-ID; None without one. Raises InvalidRequest."""
    if header is None:
        return None
    parts = header.split(",")
    if len(parts) > _MOST_MARKS or not all(_MARK.fullmatch(part) for part in parts):
        raise InvalidRequest("Last-Event-ID is not an id of our events", param="Last-Event-ID")
    marks: dict[int, Mark] = {}
    for part in parts:
        choice, token, sub = map(int, part.split("."))
        marks[choice] = (token, sub)
    return marks


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose a request with a key is, and how its key becomes free."""

    identity: Identity
    forget: Callable[[], Awaitable[None]]


class Keys:
    """The broker calls about keys."""

    def __init__(self, broker: Broker, *, timeout_s: float) -> None:
        self._broker: Final = broker
        self._timeout_s: Final = timeout_s

    async def recall(self, identity: Identity, key: Key, parent: Parent) -> AnswerSheet | None:
        """The request that the key stands for, if there is one.

        Raises:
            RemoteFailure: `idempotency_key_reused`, it stands for another body.
            Unavailable: nobody can tell now.
        """
        call = Recall(tenant=identity.tenant, key=key.key, body=key.body)
        found = await self._ask(call, parent)
        return None if found.request_id is None else codec.decode_as(AnswerSheet, found.sheet)

    async def remember(
        self, identity: Identity, key: Key, sheet: AnswerSheet, parent: Parent
    ) -> AnswerSheet | None:
        """Bind the key to a request that is about to be enqueued. Another's sheet if it is bound already.

        Raises: as `recall`; then the request must not be enqueued.
        """
        request = sheet.request
        call = Remember(
            tenant=identity.tenant,
            key=key.key,
            body=key.body,
            request_id=request.request_id,
            sheet=codec.encode(sheet),
            deadline_ns=request.deadline_ns,
        )
        try:
            found = await self._ask(call, parent)
        except Unavailable:
            await self.forget(identity, request.request_id, parent)  # it may have been bound all the same
            raise
        return None if found.new else codec.decode_as(AnswerSheet, found.sheet)

    async def find(self, identity: Identity, request_id: str, parent: Parent) -> AnswerSheet:
        """A request of the tenant. Raises NotFound and Unavailable."""
        if not _REQUEST.fullmatch(request_id):
            raise NotFound("there is no such stream, or not any more")
        found = await self._ask(Find(tenant=identity.tenant, request_id=request_id), parent)
        return codec.decode_as(AnswerSheet, found.sheet)

    def owner(self, identity: Identity, request_id: str, parent: Parent) -> Owner:
        """What goes with a request that has a key."""
        return Owner(identity=identity, forget=lambda: self.forget(identity, request_id, parent))

    async def forget(self, identity: Identity, request_id: str, parent: Parent) -> None:
        """The request will not run. Best effort: else its key is free when it expires."""
        call = Forget(tenant=identity.tenant, request_id=request_id)
        try:
            await self._broker.call(call, Done, timeout_s=self._timeout_s, parent=parent)
        except BurstlineError:
            return

    async def _ask(self, call: Recall | Remember | Find, parent: Parent) -> Remembered:
        try:
            return await self._broker.call(call, Remembered, timeout_s=self._timeout_s, parent=parent)
        except RemoteFailure as error:
            if error.status == 404:
                raise NotFound("there is no such stream, or not any more") from None
            raise
