"""What a worker says of itself: its heartbeat, and what it holds when `audit.<worker>` asks."""

from __future__ import annotations

from shared.protocol.messages.base import Message, Part, Reply
from shared.protocol.messages.requests import Speculation


class Heartbeat(Message, frozen=True, kw_only=True):
    """On `hb.<worker>`, every few seconds. Gateways route by it, the broker notes it; silence means dead."""

    worker_id: str
    epoch: str  # new at every start: replicas of an older epoch are gone
    model: str
    fingerprint: str
    vocabulary_size: int
    max_context: int
    speculation: Speculation  # the worker's default
    ready: bool
    draining: bool
    running: int
    waiting: int
    free_blocks: int  # free, or held by entries, which give way
    total_blocks: int  # 0 = not known
    at_ns: int


class HeldEntry(Part, frozen=True, kw_only=True):
    """What a worker really keeps of one published entry. `state_bytes` is 0 when only rows stay, for its children."""

    root: bytes
    key: bytes
    state_bytes: int
    kv_bytes: int


class AuditCall(Message, frozen=True, kw_only=True):
    """Which entries do you hold? Paged, so that the answer fits a payload: entries in key order, from `skip` on."""

    skip: int
    limit: int


class AuditReply(Reply, frozen=True, kw_only=True):
    """`entries` = at most `limit` of the `total` that the worker holds (published and reserved ones)."""

    worker_id: str
    epoch: str
    total: int
    entries: tuple[HeldEntry, ...]
