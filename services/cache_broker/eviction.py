"""Which entries to ask a worker to free: pure, so that the policy is tested without a database.

Policy (FR-91): a tenant makes room among its own entries that the asking worker holds, least recently used first;
leased and reserved ones are not touched, nor is the ground of the entry that needs the room (its parent, and what it
splits), nor a branch point while it has several children (its state is worth most, and workers do not give it up).
Evicting an entry with children frees its state part only; its rows go with its last child. What cannot be freed this
way is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from services.cache_broker.models import EntryState

MAX_CHILDREN: Final = 1


@dataclass(frozen=True, kw_only=True)
class Held:
    """An entry that the asking worker holds. A key stands for one namespace, so it identifies the entry."""

    key: bytes
    parent: bytes | None
    state_bytes: int
    kv_bytes: int
    state: EntryState
    leased: bool
    last_used: datetime


def plan(held: Iterable[Held], *, need: int, protect: Set[bytes], limit: int) -> tuple[bytes, ...] | None:
    """Keys that free at least `need` bytes when evicted in this order, at most `limit` of them at once.

    Entries that are already withdrawn come first: asking again mends a lost `Freed`. With more than `limit` keys
    needed, the first `limit` are returned and the worker asks again. None = no eviction makes the room.
    """
    entries = {entry.key: entry for entry in held}
    children = Counter(entry.parent for entry in entries.values() if entry.parent is not None)
    order = sorted(
        (entry for entry in entries.values() if _may_go(entry, protect)),
        key=lambda entry: (entry.state != "evicting", entry.last_used, entry.key),
    )
    chosen: list[bytes] = []
    stateless = {entry.key for entry in entries.values() if entry.state == "rows"}
    freed = 0
    while freed < need:
        # Again from the oldest each time: a branch point may go when only one of its children is left.
        entry = next((entry for entry in order if children[entry.key] <= MAX_CHILDREN), None)
        if entry is None:
            return None
        order.remove(entry)
        chosen.append(entry.key)
        freed += entry.state_bytes
        stateless.add(entry.key)
        freed += _unused_rows(entry, entries, children, stateless, protect)
    return tuple(chosen[:limit])


def _may_go(entry: Held, protect: Set[bytes]) -> bool:
    return entry.state in ("live", "evicting") and not entry.leased and entry.key not in protect


def _unused_rows(
    entry: Held,
    entries: dict[bytes, Held],
    children: Counter[bytes],
    stateless: set[bytes],
    protect: Set[bytes],
) -> int:
    """Bytes of the rows that nothing needs once `entry` has no state: its own, and those of its ancestors."""
    freed = 0
    current: Held | None = entry
    while (
        current is not None
        and current.key in stateless
        and not children[current.key]
        and current.key not in protect
    ):
        freed += current.kv_bytes
        stateless.discard(current.key)  # counted; it cannot be reached again
        if current.parent is None:
            break
        children[current.parent] -= 1
        current = entries.get(current.parent)
    return freed
