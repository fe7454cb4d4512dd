"""One function per broker call: check what came, do it in one transaction, answer. Knows no queue.

Faults travel as `Reply.failure` with a stable code; they never quote SQL, keys or digests.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final, assert_never

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.cache_broker import catalogue, idempotency, identity, leasing, reserving
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.cache_broker.hearing import Hearing
from shared.clock import Clock
from shared.errors import BurstlineError, InvalidRequest, Overloaded, PermissionRefused, Unavailable
from shared.protocol import chain
from shared.protocol.messages import (
    Abort,
    Authenticate,
    BrokerCall,
    BrokerReply,
    Commit,
    Done,
    Failure,
    Find,
    Forget,
    Freed,
    Identity,
    Lease,
    LeaseReply,
    Lookup,
    LookupReply,
    NamespaceParts,
    Recall,
    Release,
    Remember,
    Remembered,
    Reserve,
    ReserveReply,
    Withdraw,
    WithdrawReply,
)

KEY_BYTES: Final = 32
MAX_KEYS: Final = 16_384
"""Chain keys in one call: a context of a million tokens. A call of more is refused, not cut."""
MAX_ENTRY_BYTES: Final = 1 << 50


class Handlers:
    """The broker's answers."""

    def __init__(
        self,
        database: Database,
        settings: BrokerSettings,
        clock: Clock,
        registry: CollectorRegistry,
        hearing: Hearing,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._hearing = hearing
        self._calls = Counter(
            "burstline_broker_calls", "Broker calls", ["operation", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "burstline_broker_call_seconds", "Duration of broker calls", ["operation"], registry=registry
        )
        self._decisions = Counter(
            "burstline_broker_reserve", "Answers to reserve calls", ["decision"], registry=registry
        )

    async def answer(self, call: BrokerCall) -> BrokerReply:
        """The reply to a call; never raises for what a caller or the database can do wrong."""
        operation = type(call).__name__.lower()
        begin = self._clock.monotonic_ns()
        outcome = "ok"
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                return await self._dispatch(call)
        except TimeoutError:
            outcome = "unavailable"
            return refusal(call, Unavailable("the broker did not finish in time", code="broker_timeout"))
        except BurstlineError as error:
            outcome = error.code
            return refusal(call, error)
        finally:
            self._calls.labels(operation, outcome).inc()
            self._seconds.labels(operation).observe((self._clock.monotonic_ns() - begin) / 1e9)

    async def _dispatch(self, call: BrokerCall) -> BrokerReply:
        match call:
            case Authenticate():
                return await self._authenticate(call)
            case Lookup():
                return await self._lookup(call)
            case Reserve():
                return await self._reserve(call)
            case Commit():
                return await self._commit(call)
            case Abort():
                return await self._abort(call)
            case Lease():
                return await self._lease(call)
            case Release():
                return await self._release(call)
            case Withdraw() | Freed():
                return await self._let_go(call)
            case Remember() | Recall() | Find() | Forget():
                return await self._by_key(call)
            case _:
                assert_never(call)

    async def _authenticate(self, call: Authenticate) -> Identity:
        return await self._database.run(
            lambda connection: identity.authenticate(connection, call.key_digest, now=self._clock.now())
        )

    async def _lookup(self, call: Lookup) -> LookupReply:
        if not own_root(call.namespace, call.root):
            raise PermissionRefused("the root is not this namespace's", code="wrong_namespace")
        _check_keys(call.chain)
        alive_after = timedelta(seconds=self._settings.alive_after_s)
        entry = await self._database.run(
            lambda connection: catalogue.lookup(
                connection, call, now=self._clock.now(), alive_after=alive_after
            )
        )
        return LookupReply(failure=None, entry=entry)

    async def _reserve(self, call: Reserve) -> ReserveReply:
        if not own_root(call.namespace, call.root):
            raise PermissionRefused("the root is not this namespace's", code="wrong_namespace")
        _check_keys(tuple(key for key in (call.key, call.parent, call.splits) if key is not None))
        _check_sizes(call)
        ttl = timedelta(seconds=self._settings.reservation_ttl_s)
        silent_since = self._hearing.silent_since(timedelta(seconds=self._settings.alive_after_s))
        reply = await self._database.run(
            lambda connection: reserving.reserve(
                connection, call, now=self._clock.now(), ttl=ttl, silent_since=silent_since
            )
        )
        self._decisions.labels(reply.decision).inc()
        return reply

    async def _commit(self, call: Commit) -> Done:
        await self._database.run(lambda connection: catalogue.commit(connection, call, now=self._clock.now()))
        return Done(failure=None)

    async def _abort(self, call: Abort) -> Done:
        await self._database.run(
            lambda connection: catalogue.abort(
                connection, call.reservation_id, call.worker_id, now=self._clock.now()
            )
        )
        return Done(failure=None)

    async def _lease(self, call: Lease) -> LeaseReply:
        if not own_root(call.namespace, call.root):
            return LeaseReply(failure=None, lease_id=None, reason="wrong_namespace")
        _check_keys((call.key,))
        if call.ttl_s <= 0:
            raise InvalidRequest("a lease needs a positive ttl_s", param="ttl_s")
        ttl = timedelta(seconds=min(call.ttl_s, self._settings.max_lease_ttl_s))
        return await self._database.run(
            lambda connection: leasing.lease(connection, call, now=self._clock.now(), ttl=ttl)
        )

    async def _release(self, call: Release) -> Done:
        await self._database.run(lambda connection: leasing.release(connection, call.lease_id))
        return Done(failure=None)

    async def _let_go(self, call: Withdraw | Freed) -> WithdrawReply | Done:
        _check_keys(call.keys)
        now = self._clock.now()
        if isinstance(call, Withdraw):
            return await self._database.run(lambda connection: leasing.withdraw(connection, call, now=now))
        await self._database.run(
            lambda connection: leasing.freed(connection, call.worker_id, call.epoch, call.keys, now=now)
        )
        return Done(failure=None)

    async def _by_key(self, call: Remember | Recall | Find | Forget) -> Remembered | Done:
        now, window = self._clock.now(), timedelta(seconds=self._settings.idempotency_s)
        match call:
            case Remember():
                return await self._database.run(
                    lambda connection: idempotency.remember(connection, call, now=now, window=window)
                )
            case Recall():
                return await self._database.run(
                    lambda connection: idempotency.recall(connection, call, now=now)
                )
            case Find():
                return await self._database.run(
                    lambda connection: idempotency.find(connection, call, now=now)
                )
            case Forget():
                await self._database.run(lambda connection: idempotency.forget(connection, call))
                return Done(failure=None)


def own_root(namespace: NamespaceParts, root: bytes) -> bool:
    """Whether `root` is the namespace's: computed here, never believed (C4, FR-83)."""
    return chain.root(namespace) == root


def refusal(call: BrokerCall, error: BurstlineError) -> BrokerReply:
    """The reply of the call's type that carries a failure; its other fields mean nothing."""
    failure = Failure(
        code=error.code,
        message=error.message,
        status=error.status,
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else None,
    )
    match call:
        case Authenticate():
            return Identity(failure=failure, tenant="", key_id="", models=(), max_concurrent=None)
        case Lookup():
            return LookupReply(failure=failure, entry=None)
        case Reserve():
            return ReserveReply(failure=failure, decision="skips_budget", reservation_id=None, evict=())
        case Lease():
            return LeaseReply(failure=failure, lease_id=None, reason="gone")
        case Withdraw():
            return WithdrawReply(failure=failure, withdrawn=(), refused=call.keys)
        case Remember() | Recall() | Find():
            return Remembered(failure=failure, request_id=None, sheet=b"", new=False)
        case Commit() | Abort() | Release() | Freed() | Forget():
            return Done(failure=failure)
        case _:
            assert_never(call)


def _check_keys(keys: tuple[bytes, ...]) -> None:
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(f"at most {MAX_KEYS} keys a call")
    if any(len(key) != KEY_BYTES for key in keys):
        raise InvalidRequest(f"a chain key has {KEY_BYTES} bytes")


def _check_sizes(call: Reserve) -> None:
    if not 0 <= call.parent_position < call.position < 2**31:
        raise InvalidRequest("positions must ascend from the parent's to the entry's", param="position")
    if call.state_bytes < 0 or call.kv_bytes < 0 or call.state_bytes + call.kv_bytes > MAX_ENTRY_BYTES:
        raise InvalidRequest("bytes out of range", param="state_bytes")
    if call.key in (call.parent, call.splits):
        raise InvalidRequest("an entry is neither its own parent nor its own heir", param="parent")
