"""What can be said of the engine between two steps: pools, pressure, and what an eviction did. Plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCounts:
    """Conservation: free + owned + cached == total. *Cached* is what the prefix tree holds, *owned* what only
    running sequences, hits or waiting captures hold."""

    total: int
    free: int
    owned: int
    cached: int

    @property
    def balanced(self) -> bool:
        return self.free + self.owned + self.cached == self.total


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """What the engine would like to be evicted now, so that queued work or captures fit."""

    blocks: int
    snapshots: int
    ruined: int = 0  #: entries whose bytes in the host tier were wrong: they only wait to be withdrawn

    def __bool__(self) -> bool:
        return self.blocks > 0 or self.snapshots > 0 or self.ruined > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted:
    """What `Engine.evict` did. A key in `gone` left the tree with its KV; one in `stateless` lost its state and
    keeps its rows while an entry above it lives. A key named by the caller but in neither was in use. `blocks` and
    `snapshots` became free on the device; what left the host tier is not counted."""

    gone: tuple[bytes, ...]
    stateless: tuple[bytes, ...]
    blocks: int
    snapshots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AffinityCounts:
    """What became of nominations: prompts that went on from a parked session, and those that did not."""

    parked: int = 0
    served: int = 0
    declined: tuple[tuple[str, int], ...] = ()  #: by reason
    left_at: tuple[tuple[int, int], ...] = ()  #: (lower edge in tokens, declines whose tokens agreed so far)
    turns: tuple[tuple[str, int], ...] = ()  #: prompts of `reuse = "decode"` by outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedCounts:
    """States of decoding sequences that are kept beside the tree: now, parked for a next turn, and ever."""

    held: int = 0
    parked: int = 0
    kept: int = 0
    restored: int = 0
    dropped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A consistent picture between two steps."""

    blocks: PoolCounts
    slots: PoolCounts
    snapshots: PoolCounts
    waiting: int
    priming: int
    decoding: int
    pending_captures: int
    entries: int
    rounds: int
    drafted: int
    accepted: int
    capture_failures: int
    prefill_tokens: int
    decode_tokens: int
    replayed: int = 0  #: journalled tokens that were verified again
    speculating: int = 0  #: decoding streams that have a drafter
    set_aside: int = 0  #: streams parked for lack of memory, ever
    preempted: int = 0  #: those of them that gave way to older ones
    affinity: AffinityCounts = AffinityCounts()
    decoded: DecodedCounts = DecodedCounts()
    host_bytes: int = 0  #: in the host tier
    spilled: int = 0  #: blocks and states that went there, ever
    brought_back: int = 0
    mismatches: int = 0  #: copies that were not what had been taken; each was a miss
