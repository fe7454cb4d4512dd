"""The hit of one request: found in the engine, leased at the broker until the restore is complete, else given up (C3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.gpu_worker.broker import BrokerRefused
from services.gpu_worker.core import Core
from services.gpu_worker.engine.requests import Hit
from shared.errors import Unavailable
from shared.protocol.chain import LAYOUT_VERSION
from shared.protocol.messages import Done, Lease, LeaseReply, NamespaceParts, Release
from shared.telemetry import Parent

log = logging.getLogger(__name__)


class HitLease:
    """At most one hit and one lease a request. Belongs to the event loop; `close` gives back whatever is held."""

    def __init__(
        self,
        core: Core,
        *,
        request_id: str,
        engine_id: str,
        namespace: NamespaceParts,
        root: bytes,
        labels: Sequence[str],
    ) -> None:
        self._core = core
        self._request_id = request_id
        self._engine_id = engine_id
        self._namespace = namespace
        self._root = root
        self._labels = labels
        self._lease_id: str | None = None
        self._release: asyncio.Task[None] | None = None
        self._parent: Parent = None
        self._looked_up = False

    async def find(
        self, tokens: Sequence[int], chain: Sequence[bytes], parent: Parent
    ) -> tuple[Hit | None, str]:
        """The hit that may be restored, and the cache decision ("hit", "miss", or why a hit was given up)."""
        self._parent = parent
        hit = await self._lookup(tokens, chain)
        if hit is None:
            return None, "miss"
        decision = await self._take(hit)
        if decision == "hit":
            return hit, decision
        await self._drop()
        return None, decision

    async def _lookup(self, tokens: Sequence[int], chain: Sequence[bytes]) -> Hit | None:
        with self._core.telemetry.span("cache.lookup", self._parent) as span:
            self._looked_up = True
            hit = await self._core.host.call(
                lambda engine: engine.lookup(self._engine_id, self._root, tokens, chain, self._labels),
                urgent=True,
            )
            span.set_attribute("burstline.hit_position", hit.position if hit else 0)
            return hit

    async def _take(self, hit: Hit) -> str:
        who = self._core.identity
        call = Lease(
            request_id=self._request_id,
            worker_id=who.worker_id,
            epoch=who.epoch,
            namespace=self._namespace,
            root=self._root,
            key=hit.key,
            layout_version=LAYOUT_VERSION,
            ttl_s=self._core.settings.lease_ttl_s,
        )
        with self._core.telemetry.span("cache.lease", self._parent) as span:
            try:
                reply = await self._core.broker.ask(call, LeaseReply, span)
            except Unavailable:
                decision = "lease_unavailable"
            except BrokerRefused as error:
                decision = f"lease_{error.code}"
            else:
                self._lease_id = reply.lease_id
                decision = "hit" if reply.lease_id is not None else f"lease_{reply.reason}"
            span.set_attribute("burstline.decision", decision)
            return decision

    def release(self) -> None:
        """The restore is complete, or will not be: give the lease back in the background. Idempotent."""
        if self._lease_id is None or self._release is not None:
            return
        self._release = asyncio.get_running_loop().create_task(self._give_back(self._lease_id))

    async def _give_back(self, lease_id: str) -> None:
        try:
            await self._core.broker.ask(Release(lease_id=lease_id), Done, self._parent)
        except (Unavailable, BrokerRefused) as error:
            log.info("a lease is left to expire (%s)", error.code)

    async def close(self, *, submitted: bool) -> None:
        """Give back the lease, and the engine's reference unless the request was submitted (then its end does it)."""
        self.release()
        if not submitted:
            await self._drop()
        if self._release is not None:
            await self._release

    async def _drop(self) -> None:
        if self._looked_up:
            self._looked_up = False
            await self._core.host.call(lambda engine: engine.drop_hit(self._engine_id))
