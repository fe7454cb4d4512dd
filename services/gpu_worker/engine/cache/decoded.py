"""A decode-made state: a sequence as it stood somewhere off the tree, with its exact tokens, and whose it is.

Knows rows, states and owners. Who keeps it, and how long, is `decoded_pool`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from services.gpu_worker.engine.cache.entry import StoredState
from services.gpu_worker.engine.cache.offload import HostCopy
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.sequence import ProposerState


class Role(IntEnum):
    """Whose it is, in the order of giving up a snapshot."""

    RUNNING = 0
    PARKED = 1
    WAITING = 2


@dataclass(kw_only=True, slots=True, eq=False)
class DecodedState:
    """A sequence as it stood at `position`, which may be off the grid."""

    owner: int  #: `session_hash` of what it was taken of; a restore needs the same (R-Q7)
    root: bytes  #: chain root of the namespace
    tokens: tuple[int, ...]  #: one a row
    blocks: list[int | HostCopy]  #: entry i holds rows 64 i ..; one reference on each that is on the device
    state: StoredState | HostCopy
    proposer: ProposerState | None  #: null = the draft plane's rows were not written
    from_decode: bool  #: the sequence itself went on from decode-made rows
    role: Role
    labels: tuple[str, ...] = ()  #: of a parked one: its conversation, if the caller named it
    alive: bool = True  #: False once it was dropped

    @property
    def position(self) -> int:
        """Rows."""
        return len(self.tokens)

    @property
    def shared(self) -> int:
        """Blocks that a restore takes as they are. Of a parked one the unfilled last block is copied instead, since
        several turns may go on from it; what is in the host tier needs fresh ones."""
        held = sum(1 for block in self.blocks if isinstance(block, int))
        return held - (self.copies_tail and isinstance(self.blocks[-1], int))

    @property
    def copies_tail(self) -> bool:
        """Whether the unfilled last block is copied by who goes on from it."""
        return self.role is Role.PARKED and self.position % BLOCK_ROWS != 0

    @property
    def on_device(self) -> bool:
        """Whether it can be restored without the host tier."""
        return isinstance(self.state, StoredState) and all(isinstance(block, int) for block in self.blocks)
