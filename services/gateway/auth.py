"""Who is calling: an API key's SHA-256, asked of the broker, and remembered for a short time.

Refusals are remembered too, for less long, so that a client in a loop costs one call. Many requests with one new key ask
once. When the broker is away an unknown key is a 503 and not a 401: nobody said that it is wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from services.gateway.broker import Broker
from services.gateway.config import GatewaySettings
from services.gateway.faults import RemoteFailure
from shared.clock import Clock
from shared.errors import Unauthenticated, Unavailable
from shared.lifecycle import cancel_and_wait
from shared.protocol.messages import Authenticate, Identity
from shared.telemetry import Parent, Telemetry

_HEADER: Final = re.compile(r"^[Bb]earer ([\x21-\x7e]{1,256})$")


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What a key stood for when the broker was asked; no identity = it is no key."""

    identity: Identity | None
    until_ns: int


class Authenticator:
    """Owns the cache of identities; bounded in entries and in time."""

    def __init__(self, broker: Broker, telemetry: Telemetry, settings: GatewaySettings, clock: Clock) -> None:
        self._broker: Final = broker
        self._telemetry: Final = telemetry
        self._settings: Final = settings
        self._clock: Final = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Identity | None]] = {}

    async def identify(self, authorization: str | None, parent: Parent) -> Identity:
        """The identity behind an Authorization header. A key that has to be asked for is a span of its own.

        Raises:
            Unauthenticated: no key, or one that is unknown, expired or revoked.
            Unavailable: the broker is away and the key is not known here.
        """
        match = _HEADER.match(authorization or "")
        if match is None:
            raise Unauthenticated("an API key is needed: Authorization: Bearer <key>")
        digest = hashlib.sha256(match[1].encode()).hexdigest()
        known = self._known.get(digest)
        if known is not None and self._clock.monotonic_ns() < known.until_ns:
            self._known.move_to_end(digest)
            identity = known.identity
        else:
            with self._telemetry.span("auth", parent) as span:
                identity = await self._ask_once(digest, span)
        if identity is None:
            raise Unauthenticated("this API key is not valid")
        return identity

    async def _ask_once(self, digest: str, parent: Parent) -> Identity | None:
        task = self._asking.get(digest)
        if task is None:
            task = asyncio.create_task(self._ask(digest, parent), name="authenticate")
            self._asking[digest] = task
            task.add_done_callback(lambda _: self._asking.pop(digest, None))
        return await asyncio.shield(task)

    async def _ask(self, digest: str, parent: Parent) -> Identity | None:
        identity: Identity | None
        try:
            identity = await self._broker.call(
                Authenticate(key_digest=digest),
                Identity,
                timeout_s=self._settings.broker_timeout_s,
                parent=parent,
            )
        except RemoteFailure as error:
            if error.status not in (401, 403, 404):
                raise Unavailable("keys cannot be checked now") from error
            identity = None
        self._remember(digest, identity)
        return identity

    def _remember(self, digest: str, identity: Identity | None) -> None:
        good, bad = self._settings.auth_cache_s, self._settings.auth_negative_cache_s
        until = self._clock.monotonic_ns() + int((bad if identity is None else good) * 1e9)
        self._known[digest] = _Known(identity=identity, until_ns=until)
        self._known.move_to_end(digest)
        while len(self._known) > self._settings.auth_cache_entries:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """End the calls that are under way."""
        await cancel_and_wait(list(self._asking.values()))
