"""The wire of NATS; with `nats_client.py` and `frames.py` the only importer of nats-py.

Designed round faults of nats-py 2.16: its flush is no barrier (PING overtakes what waits in the flusher, so ours
flushes twice), its pull subscriptions hang on orphaned requests (`pull.py` has its own), its requests read each answer in
a task (ours take it from the reader), its first connect retries for ever (ours has a limit). Once up, the connection is
kept up for ever, with backoff and jitter and a bounded buffer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from nats import errors as nats_errors
from nats.aio.client import Server
from nats.aio.subscription import Subscription as NatsSubscription

from shared.errors import BurstlineError, PayloadTooLarge, ProtocolError, Unavailable
from shared.logs import redact
from shared.transport.access import Access
from shared.transport.asked import Asked
from shared.transport.base import Headers
from shared.transport.client import WireTransport
from shared.transport.nats_client import PatientClient
from shared.transport.wire import NobodyListens, Raw, Unanswered

_log = logging.getLogger(__name__)

CONNECT_S: Final = 10.0
_QUIET_S: Final = 0.3
"""A first connection that takes longer is told, once."""
_PENDING_BYTES: Final = 2 << 20  # of publishes that wait for a reconnect
_PING_S: Final = 20
_FIRST_BACKOFF_S: Final = 0.05
_LONGEST_BACKOFF_S: Final = 5.0
_TOLD_ERRORS: Final = 64

NatsTransport = WireTransport


async def connect(
    url: str, *, name: str, access: Access | None = None, timeout: float = CONNECT_S
) -> NatsTransport:
    """Connect to one of the servers in `url` (comma-separated). Raises Unavailable after `timeout` seconds."""
    wire = NatsWire(name)
    await wire.open(url, access or Access(), timeout)
    return NatsTransport(wire)


class NatsWire:
    """A `Wire` on one nats-py client."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._client = PatientClient()
        self._up = asyncio.Event()
        self._opened = False
        self._closing = False
        self._last_error = ""
        self._told: set[str] = set()
        self._answers: dict[str, asyncio.Future[Raw | None]] = {}  # by the inbox of each question
        self._inbox = ""
        self._asked = 0
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._lost_callbacks: list[Callable[[], None]] = []

    async def open(self, url: str, access: Access, timeout: float) -> None:
        """Connect for the first time; a wait is told while it lasts. Raises Unavailable."""
        told = asyncio.get_running_loop().call_later(_QUIET_S, self._tell_wait, redact(url), timeout)
        try:
            async with asyncio.timeout(timeout):
                await self._client.connect(
                    [server.strip() for server in url.split(",")],
                    name=self._name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                    closed_cb=self._on_closed,
                    reconnect_to_server_handler=_next_server,
                    reconnect_time_wait=1,
                    max_reconnect_attempts=-1,
                    connect_timeout=5,
                    ping_interval=_PING_S,
                    pending_size=_PENDING_BYTES,
                    user=access.user,
                    password=access.password,
                    token=access.token,
                    tls=access.tls,
                    user_credentials=str(access.credentials_file) if access.credentials_file else None,
                )
        except (TimeoutError, nats_errors.Error, OSError, ImportError) as error:
            reason = redact(self._last_error or str(error) or "no answer")  # before hanging up fails too
            self._closing = True
            await self._client.close()
            raise Unavailable(
                f"no connection to NATS at {redact(url)} within {timeout:g} s: {reason}. BURSTLINE_NATS_URL says where "
                "it is; `burstline up` brings its own"
            ) from error
        finally:
            told.cancel()
        self._opened = True
        self._up.set()

    def _tell_wait(self, url: str, timeout: float) -> None:
        why = self._last_error or "no answer yet"
        _log.warning("waiting for NATS at %s, for %g s at most: %s", url, timeout, why)

    async def close(self) -> None:
        """End for good. Idempotent."""
        self._closing = True
        self._up.clear()
        if not self._client.is_connected:
            self._client._pending.clear()  # nats-py would write it to the dead socket, and fail half-way through
            self._client._pending_data_size = 0
        try:
            await self._client.close()
        except OSError as error:
            _log.debug("close: %s", error)

    @property
    def max_payload_bytes(self) -> int:
        return int(self._client.max_payload)

    @property
    def server_version(self) -> str:
        return str(self._client._server_info.get("version", ""))

    def inbox(self) -> str:
        return str(self._client.new_inbox())

    async def connected(self, timeout: float) -> bool:
        if self._up.is_set():
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    async def barrier(self, timeout: float) -> None:
        """Until the server has everything that was sent. Raises Unanswered after about `timeout` seconds."""
        if not await self.connected(timeout):
            raise NobodyListens("there is no connection to NATS")
        with _translated("flush"):
            await self._client.flush(timeout)
            await self._client.flush(timeout)

    async def send(
        self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None
    ) -> None:
        if not self._client.post(subject, data, reply, headers):
            with _translated(subject):
                await self._client.publish(
                    subject, data, reply=reply, headers=dict(headers) if headers else None
                )

    async def ask(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Raw:
        return await (await self.pose(subject, data, timeout=timeout, headers=headers)).answer()

    async def pose(
        self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None, soon: bool = False
    ) -> Asked:
        if not self._inbox:
            self._inbox = self.inbox()
            with _translated(subject):
                await self._client.hear(f"{self._inbox}.*", "", self._answered)
        self._asked += 1
        inbox = f"{self._inbox}.{self._asked}"
        question = Asked(self._answers, inbox, subject, timeout)
        if not self._client.post(subject, data, inbox, headers, soon=soon):
            try:
                with _translated(subject):
                    async with asyncio.timeout(timeout):
                        await self._client.publish(
                            subject, data, reply=inbox, headers=dict(headers) if headers else None
                        )
            except BaseException:
                question.drop()
                raise
        return question

    def _answered(self, raw: Raw) -> None:
        answer = self._answers.get(raw.subject)
        if answer is not None and not answer.done():
            answer.set_result(raw)

    async def listen(self, subject: str, receive: Callable[[Raw], None], *, queue: str = "") -> _Listening:
        with _translated(subject):
            subscription = await self._client.hear(subject, queue, receive)
        return _Listening(self, subscription)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._reconnect_callbacks.append(callback)

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._lost_callbacks.append(callback)

    async def unlisten(self, subscription: NatsSubscription) -> None:
        """End a subscription; what the server no longer knows is no error."""
        try:
            await self._client.unhear(subscription)
        except (nats_errors.Error, OSError) as error:
            _log.debug("unsubscribe: %s", error)

    # nats-py calls these

    async def _on_error(self, error: Exception) -> None:
        """Tell every fault once, and those of a lost connection not at all."""
        text = redact(str(error) or type(error).__name__)
        self._last_error = text
        if not self._opened and "authorization" in text.lower():
            raise error  # ends the first connect: trying again would not help
        if not self._up.is_set():
            _log.debug("NATS: %s", text)
            return
        if text not in self._told and len(self._told) < _TOLD_ERRORS:
            self._told.add(text)
            _log.warning("NATS: %s (told once)", text)

    async def _on_disconnect(self) -> None:
        was_up = self._up.is_set()
        self._up.clear()
        if was_up and not self._closing:
            _log.warning("the connection to NATS is lost; reconnecting")

    async def _on_reconnect(self) -> None:
        self._up.set()
        _log.info("the connection to NATS is up again")
        for callback in self._reconnect_callbacks:
            callback()

    async def _on_closed(self) -> None:
        self._up.clear()
        if not self._closing:
            _log.error("the connection to NATS has ended: %s", self._last_error or "no reason given")
            for callback in self._lost_callbacks:
                callback()


class _Listening:
    """A `Closer`."""

    def __init__(self, wire: NatsWire, subscription: NatsSubscription) -> None:
        self._wire = wire
        self._subscription = subscription

    async def close(self) -> None:
        await self._wire.unlisten(self._subscription)


def _next_server(servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
    """The server that failed least, and how long to wait: doubling, bounded, with jitter against stampedes."""
    chosen = min(servers, key=lambda server: server.reconnects)
    wait = min(_FIRST_BACKOFF_S * 2 ** min(chosen.reconnects, 10), _LONGEST_BACKOFF_S)
    return chosen, wait * random.uniform(0.5, 1.5)


class _translated:
    """Foreign errors of a block in our words. A class, since every message pays for entering a generator."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (known := _in_our_words(self._what, error)) is not None:
            raise known from error


def _in_our_words(what: str, error: BaseException) -> BurstlineError | None:
    match error:
        case nats_errors.MaxPayloadError():
            return PayloadTooLarge(f"{what}: over the server's payload limit")
        case nats_errors.BadSubjectError() | nats_errors.BadHeaderError():
            return ProtocolError(f"{what}: not a subject or header that NATS takes")
        case (
            nats_errors.OutboundBufferLimitError()
            | nats_errors.ConnectionClosedError()
            | nats_errors.ConnectionDrainingError()
        ):
            return NobodyListens(f"{what}: there is no connection to NATS")
        case TimeoutError():
            return Unanswered(f"{what}: no answer in time")
        case nats_errors.Error() | OSError():
            return Unavailable(f"{what}: {redact(str(error))}")
        case _:
            return None
