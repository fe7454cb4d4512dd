"""The worker's own book of what it holds for the cache: by chain key, what the broker charges and the audit counts.

A chain key stands for one namespace only, so it is the key here too. Rows belong to the entry that reserved them: a split
moves them, an eviction below a child leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.gpu_worker.engine.events import Captured
from services.gpu_worker.engine.stats import Evicted
from shared.protocol.messages import HeldEntry


@dataclass(frozen=True, kw_only=True)
class Record:
    """One entry. `state_bytes` is 0 when only rows stay, for its children."""

    root: bytes
    position: int
    state_bytes: int
    kv_bytes: int


class EntryBook:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def position(self, key: bytes | None) -> int:
        """Of an entry, 0 for the root. Raises KeyError for an entry that is not held."""
        return 0 if key is None else self._records[key].position

    def deepest_first(self) -> tuple[bytes, ...]:
        """Every key, an entry before the one that it stands on."""
        return tuple(sorted(self._records, key=lambda key: self._records[key].position, reverse=True))

    def publish(self, root: bytes, capture: Captured) -> None:
        """A capture became an entry, or an entry got its state back."""
        known = self._records.get(capture.key)
        if capture.splits_key is not None:
            self._shrink(capture.splits_key, capture.kv_bytes)
        self._records[capture.key] = Record(
            root=root,
            position=capture.position,
            state_bytes=capture.state_bytes,
            kv_bytes=capture.kv_bytes + (known.kv_bytes if known else 0),
        )

    def _shrink(self, key: bytes, kv_bytes: int) -> None:
        record = self._records[key]
        self._records[key] = replace(record, kv_bytes=record.kv_bytes - kv_bytes)

    def evict(self, evicted: Evicted) -> None:
        """What the engine freed."""
        for key in evicted.gone:
            self._records.pop(key, None)
        for key in evicted.stateless:
            if key in self._records:
                self._records[key] = replace(self._records[key], state_bytes=0)

    def page(self, *, skip: int, limit: int) -> tuple[HeldEntry, ...]:
        """Entries in key order."""
        begin = max(0, skip)
        return tuple(
            HeldEntry(root=record.root, key=key, state_bytes=record.state_bytes, kv_bytes=record.kv_bytes)
            for key, record in sorted(self._records.items(), key=lambda item: item[0])[
                begin : begin + max(0, limit)
            ]
        )
