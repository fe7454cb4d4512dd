"""Calls to the broker about prefix entries: found, reserved, committed, leased, withdrawn, freed.

reserve ──granted──> commit ──> found by lookups, leased for a restore ──> withdraw ──> freed
             └─────> abort
"""

from __future__ import annotations

from typing import Literal

from shared.protocol.messages.base import Message, Part, Reply
from shared.protocol.messages.requests import NamespaceParts


class EntryRef(Part, frozen=True, kw_only=True):
    """One prefix entry: (namespace root, chain key, layout version) and who holds its bytes."""

    key: bytes
    position: int
    workers: tuple[str, ...]


class Lookup(Message, frozen=True, kw_only=True):
    """The longest published entry among `chain` (chain keys of the prompt's full blocks, ascending)."""

    namespace: NamespaceParts
    root: bytes
    chain: tuple[bytes, ...]
    layout_version: int


class LookupReply(Reply, frozen=True, kw_only=True):
    """`entry` None = miss."""

    entry: EntryRef | None


class Reserve(Message, frozen=True, kw_only=True):
    """Ask for room before anything is kept. Bytes are the entry's own: its state part and the KV rows above its parent.

    `parent` is the nearest entry below that this worker holds and has reserved (its rows are charged there); None with
    `parent_position` 0 when there is none. Failure `parent_gone` if the broker does not know it as held by this worker.
    Asking again with the same request, worker and key gives the same reservation. A key that this worker withdrew is
    taken to be freed.

    `splits` names an entry of this worker with the same parent whose lower rows pass to this one: `kv_bytes` of it are
    charged here instead of there, and this entry becomes its parent. An abort gives them back.
    """

    request_id: str
    worker_id: str
    epoch: str
    namespace: NamespaceParts
    root: bytes
    key: bytes
    parent: bytes | None
    splits: bytes | None
    layout_version: int
    position: int
    parent_position: int
    state_bytes: int
    kv_bytes: int


class ReserveReply(Reply, frozen=True, kw_only=True):
    """`granted`, or a refusal: "exists", "skips_budget", "skips_pinned"; or "evict": withdraw these keys, ask again.

    The keys to evict are entries of the same tenant that this worker holds, of any of its namespaces (a chain key
    stands for one namespace only, so it needs no root beside it).
    """

    decision: Literal["granted", "exists", "skips_budget", "skips_pinned", "evict"]
    reservation_id: str | None
    evict: tuple[bytes, ...]


class Commit(Message, frozen=True, kw_only=True):
    """The bytes exist: the entry becomes visible to lookups."""

    reservation_id: str
    worker_id: str
    epoch: str
    digest: str  # hex, of the entry's content; "" while the bytes stay inside the worker's process


class Abort(Message, frozen=True, kw_only=True):
    """The bytes will not exist: the reservation is refunded."""

    reservation_id: str
    worker_id: str


class Lease(Message, frozen=True, kw_only=True):
    """Hold an entry until the restore is complete. Refused when it is gone, evicting, or of another namespace."""

    request_id: str
    worker_id: str
    epoch: str
    namespace: NamespaceParts
    root: bytes
    key: bytes
    layout_version: int
    ttl_s: int


class LeaseReply(Reply, frozen=True, kw_only=True):
    """`lease_id` None = refused, with the reason."""

    lease_id: str | None
    reason: Literal["granted", "gone", "evicting", "not_held_here", "wrong_namespace"]


class Release(Message, frozen=True, kw_only=True):
    """Give a lease back. Idempotent."""

    lease_id: str


class Withdraw(Message, frozen=True, kw_only=True):
    """A holder wants to free entries: refused for those that are leased or not yet committed; the rest are gone for
    lookups from now on. Keys that the broker does not know may be freed. Idempotent. Failure `epoch_gone` when the
    broker declared this epoch over: none of its entries is known any more. Without keys it asks just that."""

    worker_id: str
    epoch: str
    keys: tuple[bytes, ...]


class WithdrawReply(Reply, frozen=True, kw_only=True):
    """The keys that may be freed now, and those that may not."""

    withdrawn: tuple[bytes, ...]
    refused: tuple[bytes, ...]


class Freed(Message, frozen=True, kw_only=True):
    """Withdrawn bytes are free: refund them in the ledger. Idempotent.

    While an entry has children, its state part is free and its KV rows stay, and stay charged; they go with the last
    child: freeing a child also frees the rows of ancestors that have no state and no other child.
    """

    worker_id: str
    epoch: str
    keys: tuple[bytes, ...]
