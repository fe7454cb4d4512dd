"""Values of the prefix cache: entries, the states in them, captures that wait for the broker, holds on a hit."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from services.gpu_worker.engine.cache.offload import HostCopy
from services.gpu_worker.engine.config import BLOCK_ROWS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredState:
    """What continuing would destroy, valid at one boundary."""

    snapshot: int  #: recurrent and conv states in the snapshot pool
    last_hidden: Tensor
    """[H] float32, final-normed hidden of the row before the boundary; pairs the next draft row."""


@dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """A boundary that owns the KV rows (parent's position, its position] and at most one state.

    Not `published` = the broker has not granted it yet: it holds its place and no lookup finds it.
    """

    key: bytes
    position: int
    parent: Entry | None
    state: StoredState | None = None
    host: HostCopy | None = None  #: the state, when it was spilled; never beside `state`
    published: bool = False
    pins: int = 0  #: hits that may still restore the state
    children: int = 0  #: entries whose parent this is, unpublished ones included
    used_at: int = 0  #: the tree's tick of the last hit or publication

    @property
    def blocks(self) -> int:
        """Blocks that this entry owns."""
        return (self.position - self.floor) // BLOCK_ROWS

    @property
    def kept(self) -> bool:
        """Whether its state exists, here or in the host tier."""
        return self.state is not None or self.host is not None

    @property
    def floor(self) -> int:
        """First row that this entry owns."""
        return self.parent.position if self.parent else 0


@dataclass(kw_only=True, slots=True, eq=False)
class Capture:
    """A boundary capture between prime and the broker's answer. `fresh` = the entry was made for it."""

    capture_id: int
    request_id: str
    entry: Entry
    fresh: bool
    parent: Entry | None  #: nearest entry below when it was captured; a later split may come between
    splits: Entry | None  #: whose rows up to the position passed to the entry
    state: StoredState
    kv_blocks: int  #: blocks that the entry is charged for by this capture


@dataclass(kw_only=True, slots=True, eq=False)
class Hold:
    """References on a hit between lookup and the last restore of its request."""

    entry: Entry
    tokens: list[int]
    blocks: list[int]  #: of the rows that are on the device: all of them once the hit was brought back
    waiting: int = field(default=0)  #: submitted choices that have not restored yet
