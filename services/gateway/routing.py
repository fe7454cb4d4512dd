"""Where a request goes: to the worker that holds its longest prefix entry, if that one can take it soon; else to all.

A lookup may fail, refuse or be late: then it is a miss, and the request goes the cold way (C3).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from services.gateway.broker import Broker
from services.gateway.workers import Crew
from shared.errors import BurstlineError
from shared.outage import Outage
from shared.protocol import chain, subjects
from shared.protocol.messages import EntryRef, GenerateRequest, Heartbeat, Lookup, LookupReply, unpack_tokens
from shared.telemetry import Parent, Telemetry

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The subject, and why: "affinity" (a worker holds the entry), "shared", or the fault of the lookup."""

    subject: str
    reason: str
    position: int  # of the entry that is known, 0 without one
    worker: str | None = None  # whose own subject it is; None = shared


def choose(request: GenerateRequest, crew: Crew, entry: EntryRef | None, *, max_waiting: int) -> Route:
    """Pure decision. A holder that is gone, draining or overloaded is passed over: a hit is not worth a long wait."""
    shared = subjects.request_shared(crew.fingerprint, request.priority, request.tenant)
    if entry is None:
        return Route(subject=shared, reason="shared", position=0)
    blocks = _blocks(request, entry)
    holders = [
        worker
        for worker in crew.workers
        if worker.worker_id in entry.workers
        and worker.waiting <= max_waiting
        and not _short_of_room(worker, blocks)
    ]
    if not holders:
        return Route(subject=shared, reason="holder_unavailable", position=entry.position)
    best = min(holders, key=lambda worker: (worker.waiting + worker.running, worker.worker_id))
    to = subjects.request_to(crew.fingerprint, best.worker_id, request.tenant)
    return Route(subject=to, reason="affinity", position=entry.position, worker=best.worker_id)


def _blocks(request: GenerateRequest, entry: EntryRef) -> int:
    """Pages that a request needs beside the entry's to begin: the rest of its prompt, and one for each choice."""
    rest = len(request.prompt) // 4 - entry.position
    return -(-rest // chain.GRID) + request.choices


def _short_of_room(worker: Heartbeat, blocks: int) -> bool:
    """Whether requests wait there already and this one would wait for pages as well."""
    return worker.waiting > 0 and worker.total_blocks > 0 and worker.free_blocks < blocks


class Router:
    """Looks up, then chooses."""

    def __init__(self, broker: Broker, telemetry: Telemetry, *, timeout_s: float, max_waiting: int) -> None:
        self._broker: Final = broker
        self._telemetry: Final = telemetry
        self._timeout_s: Final = timeout_s
        self._max_waiting: Final = max_waiting
        self._outage: Final = Outage(_log, "lookups")

    async def route(self, request: GenerateRequest, crew: Crew, parent: Parent) -> Route:
        """Where `request` goes. Never raises for a fault of the lookup."""
        entry: EntryRef | None = None
        fault: str | None = None
        root = chain.root(request.namespace)
        keys = chain.chain(root, unpack_tokens(request.prompt))
        if request.cache.enabled and keys:
            call = Lookup(
                namespace=request.namespace, root=root, chain=keys, layout_version=chain.LAYOUT_VERSION
            )
            try:
                entry = await self._lookup(call, parent)
                self._outage.worked()
            except BurstlineError as error:
                fault = error.code
                self._outage.failed(error.code)
        route = choose(request, crew, entry, max_waiting=self._max_waiting)
        if fault is not None:
            return Route(subject=route.subject, reason=f"lookup_{fault}", position=0)
        return route

    async def _lookup(self, call: Lookup, parent: Parent) -> EntryRef | None:
        with self._telemetry.span("lookup", parent) as span:
            reply = await self._broker.call(call, LookupReply, timeout_s=self._timeout_s, parent=span)
            span.set_attribute("burstline.entry_position", reply.entry.position if reply.entry else 0)
            return reply.entry
