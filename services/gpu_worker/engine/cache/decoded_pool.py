"""Decode-made rows and states that outlive their sequence: never entries of the tree, since a cold prefill would make
other bits (C1.3). Each is a snapshot, references on the rows below it, and the exact tokens of these rows.

    checkpoint of a running stream ──gives way──> of a waiting one ──comes back──> of a running one ──end──> dropped
    end of an opted-in session ──> parked ──next turn restores a copy──> parked ──newer turn, limit, pressure──> dropped

Under pressure: states of running streams go first, they cost only a replay; then what nobody runs on moves to the host
tier, and when that is full the parked go, the least recent first, then those of waiting streams.

Bounded: at most `most` at a time. Knows rows, states and owners. Does not know requests, nor when to keep what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.cache.decoded import DecodedState, Role
from services.gpu_worker.engine.cache.entry import StoredState
from services.gpu_worker.engine.cache.offload import HostCopy, HostTier
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.stats import DecodedCounts
from shared.errors import EngineFault


class States(Protocol):
    """What is asked of the recurrent states' pool."""

    def take_snapshot(self, slot: int, snapshot: int) -> None: ...

    def restore(self, snapshot: int, slot: int) -> None: ...


class DecodedStates:
    """In the order of their keeping, the most recently used last."""

    def __init__(
        self, blocks: BlockAllocator, snapshots: IdPool, states: States, tier: HostTier, *, most: int
    ) -> None:
        self.most = most
        self.kept = self.restored = self.dropped = 0
        self._blocks = blocks
        self._snapshots = snapshots
        self._states = states
        self._tier = tier
        self._held: list[DecodedState] = []

    def __iter__(self) -> Iterator[DecodedState]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_place(self) -> bool:
        """Whether a running stream's checkpoint would be kept now, beside all that are."""
        return len(self._held) < self.most and self._snapshots.free > 0

    # -- keep and drop ------------------------------------------------------------------------------------------

    def keep(
        self,
        sequence: SequenceState,
        *,
        root: bytes,
        last_hidden: Tensor,
        role: Role,
        labels: tuple[str, ...] = (),
    ) -> DecodedState | None:
        """Keep a sequence as it stands, whose slot must be settled. Null, and nothing taken, without a free snapshot or
        when the limit is reached by what is no less worth keeping."""
        if not self._make_place(role):
            return None
        snapshot = self._snapshots.acquire()
        if snapshot is None:
            return None
        self._states.take_snapshot(sequence.ssm_slot_idx(), snapshot)
        blocks = sequence.block_table[: -(-sequence.seq_len // BLOCK_ROWS)]
        self._blocks.retain(blocks)
        decoded = DecodedState(
            owner=sequence.session_hash,
            root=root,
            tokens=tuple(sequence.tokens),
            blocks=list(blocks),
            state=StoredState(snapshot=snapshot, last_hidden=last_hidden.clone()),
            proposer=sequence.proposer_state,
            from_decode=sequence.from_decode,
            role=role,
            labels=labels,
        )
        self._held.append(decoded)
        self.kept += 1
        return decoded

    def _make_place(self, role: Role) -> bool:
        if len(self._held) < self.most:
            return True
        less = [
            decoded for decoded in self._held if decoded.role < role or role is Role.PARKED is decoded.role
        ]
        if not less:
            return False
        self.drop(min(less, key=lambda decoded: decoded.role))
        return True

    def drop(self, decoded: DecodedState | None) -> None:
        """Give everything back. Null, or one that was dropped before, is let pass."""
        if decoded is None or not decoded.alive:
            return
        decoded.alive = False
        self._held.remove(decoded)
        self.dropped += 1
        for block in decoded.blocks:
            self._forget(block)
        self._forget_state(decoded)

    def _forget(self, block: int | HostCopy) -> None:
        if isinstance(block, int):
            self._blocks.release([block])
        else:
            self._tier.drop(block)

    def _forget_state(self, decoded: DecodedState) -> None:
        if isinstance(decoded.state, StoredState):
            self._snapshots.release(decoded.state.snapshot)
        else:
            self._tier.drop(decoded.state)

    def replace(self, newer: DecodedState) -> None:
        """Parked turns before `newer` of the same conversation go: it holds their tokens and more."""
        for older in self.parked:
            alike = (older.root, older.labels) == (newer.root, newer.labels)
            if alike and older is not newer and older.tokens == newer.tokens[: older.position]:
                self.drop(older)

    # -- find and restore ---------------------------------------------------------------------------------------

    def find(self, root: bytes, tokens: Sequence[int]) -> DecodedState | None:
        """The longest parked one of the namespace whose exact tokens prefix `tokens` and leave at least one to
        compute."""
        fitting = [
            decoded
            for decoded in self._held
            if decoded.role is Role.PARKED
            and decoded.root == root
            and decoded.position < len(tokens)
            and decoded.tokens == tuple(tokens[: decoded.position])
        ]
        return max(fitting, key=lambda decoded: decoded.position, default=None)

    def bring(self, decoded: DecodedState) -> bool:
        """Bring what is in the host tier to the device, checked. False: bytes were wrong or no snapshot is free, and
        it is dropped (C3). Raises EngineFault when there are too few free blocks."""
        away = [i for i, block in enumerate(decoded.blocks) if isinstance(block, HostCopy)]
        fresh = self._blocks.allocate(len(away))
        if fresh is None:
            raise EngineFault("a planned restore did not fit")
        good = True
        for index, block in zip(away, fresh, strict=True):
            copy = decoded.blocks[index]
            assert isinstance(copy, HostCopy)
            good = good and self._tier.bring_block(copy, block)
            self._tier.drop(copy)
            decoded.blocks[index] = block
        return (good and self._bring_state(decoded)) or self._lost(decoded)

    def _bring_state(self, decoded: DecodedState) -> bool:
        if isinstance(decoded.state, StoredState):
            return True
        snapshot = self._snapshots.acquire()
        if snapshot is None:
            return False
        hidden = self._tier.bring_state(decoded.state, snapshot)
        if hidden is None:
            self._snapshots.release(snapshot)
            return False
        self._tier.drop(decoded.state)
        decoded.state = StoredState(snapshot=snapshot, last_hidden=hidden)
        return True

    def _lost(self, decoded: DecodedState) -> bool:
        self.drop(decoded)
        return False

    def restore(self, decoded: DecodedState, sequence: SequenceState) -> Tensor:
        """Make a fresh sequence what was kept; its table holds the fresh blocks, enough of them. Answers the hidden [H]
        of the newest row.

        Raises EngineFault, with nothing changed, unless it is on the device and, but for a parked one, the sequence has
        the same owner (R-Q7).
        """
        if not decoded.alive or not decoded.on_device or not isinstance(decoded.state, StoredState):
            raise EngineFault("a kept state is not on the device")
        if decoded.role is not Role.PARKED and decoded.owner != sequence.session_hash:
            raise EngineFault("a kept state belongs to another stream")
        rows = [block for block in decoded.blocks if isinstance(block, int)]
        tail = rows.pop() if decoded.copies_tail else None
        self._blocks.retain(rows)
        if tail is not None:
            self._tier.copy_block(tail, sequence.block_table[0])
        sequence.go_on_from(decoded.tokens, rows, draft_rows=decoded.proposer is not None)
        sequence.proposer_state = decoded.proposer
        sequence.from_decode = decoded.from_decode or decoded.role is Role.PARKED
        if decoded.role is Role.PARKED:
            sequence.marconi_skip_to = sequence.cached_prefix_tokens = decoded.position
        self._states.restore(decoded.state.snapshot, sequence.ssm_slot_idx())
        self._held.remove(decoded)
        self._held.append(decoded)
        self.restored += 1
        return decoded.state.last_hidden

    # -- pressure -----------------------------------------------------------------------------------------------

    def free_snapshot(self, but: DecodedState | None = None) -> bool:
        """Somebody must have a snapshot now: give up the least worth one. False when none has any."""
        for decoded in sorted(self._held, key=lambda decoded: decoded.role):
            if decoded is but or not isinstance(decoded.state, StoredState):
                continue
            if decoded.role is Role.RUNNING or not self._spill_state(decoded):
                self.drop(decoded)
            return True
        return False

    def free_blocks(self, count: int, but: DecodedState | None = None) -> bool:
        """Somebody must have `count` free blocks more: move what nobody runs on to the host, then drop it. True when
        any came free."""
        before, wanted = self._blocks.free, self._blocks.free + count
        idle = [d for d in self._held if d.role is not Role.RUNNING and d is not but]
        for decoded in idle:
            if self._blocks.free < wanted:
                self.spill(decoded)
        for decoded in sorted(idle, key=lambda decoded: decoded.role):
            if self._blocks.free < wanted and self._device_blocks(decoded):
                self.drop(decoded)
        return self._blocks.free > before

    def spill(self, decoded: DecodedState) -> None:
        """Move what only this one holds to the host tier, as far as it has room; rows that others read stay."""
        for index in reversed(range(len(decoded.blocks))):
            block = decoded.blocks[index]
            if not isinstance(block, int) or self._blocks.refs(block) > 1:
                continue
            copy = self._tier.take_block(block)
            if copy is None:
                return
            decoded.blocks[index] = copy
            self._blocks.release([block])
        self._spill_state(decoded)

    def _spill_state(self, decoded: DecodedState) -> bool:
        if not isinstance(decoded.state, StoredState):
            return False
        copy = self._tier.take_state(decoded.state.snapshot, decoded.state.last_hidden)
        if copy is None:
            return False
        self._snapshots.release(decoded.state.snapshot)
        decoded.state = copy
        return True

    @staticmethod
    def _device_blocks(decoded: DecodedState) -> int:
        return sum(1 for block in decoded.blocks if isinstance(block, int))

    # -- accounts -----------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[int]:
        """Every block on the device, once for each reference held on it."""
        return (block for decoded in self._held for block in decoded.blocks if isinstance(block, int))

    @property
    def parked(self) -> list[DecodedState]:
        """Those that wait for a next turn, which give way to whatever needs their room."""
        return [decoded for decoded in self._held if decoded.role is Role.PARKED]

    @property
    def snapshots(self) -> int:
        """Snapshots held."""
        return sum(1 for decoded in self._held if isinstance(decoded.state, StoredState))

    @property
    def host_bytes(self) -> int:
        """Bytes held in the host tier."""
        copies = [part for decoded in self._held for part in (decoded.state, *decoded.blocks)]
        return sum(copy.size for copy in copies if isinstance(copy, HostCopy))

    def counts(self) -> DecodedCounts:
        """What is held, and what became of them."""
        return DecodedCounts(
            held=len(self),
            parked=len(self.parked),
            kept=self.kept,
            restored=self.restored,
            dropped=self.dropped,
        )

    def check(self) -> None:
        """Raises EngineFault unless the bound holds and every table covers its rows."""
        if len(self._held) > self.most:
            raise EngineFault(f"{len(self._held)} decoded states are kept of {self.most} at most")
        if any(len(d.blocks) != -(-d.position // BLOCK_ROWS) or not d.alive for d in self._held):
            raise EngineFault("a decoded state does not hold the blocks of its rows")
