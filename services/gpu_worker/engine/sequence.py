"""The state of one sequence, and the guard that gives back what it holds.

Knows no pool: whoever hands a resource to a sequence tells the guard how to take it back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from services.gpu_worker.engine.config import BLOCK_ROWS, FULL
from services.gpu_worker.engine.events import TokenLogprob
from shared.errors import EngineFault


def session_hash(root: bytes, request_id: str, choice: int) -> int:
    """Who owns what is kept of a stream: 64 bits of a SHA-256 over its namespace and its name; never 0 (R-Q7)."""
    name = hashlib.sha256(root + choice.to_bytes(8, "little") + request_id.encode())
    return int.from_bytes(name.digest()[:8], "little") or 1


def layer_states(layer_types: Sequence[str], slot: int | None) -> tuple[int | None, ...]:
    """Where the state of each layer of a sequence is, from the bottom up: its slot, or null for full attention."""
    return tuple(None if kind == FULL else slot for kind in layer_types)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProposerState:
    """What a drafter of one sequence knows and has not written to the draft plane: `tokens` from position `start` on,
    and the hiddens [n, H] of the rows before them. All draft rows below `start` are written."""

    start: int
    tokens: tuple[int, ...] = ()
    hiddens: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedPrefillMeta:
    """What the first chunk of a prompt decides for all of them."""

    cuts: tuple[int, ...]  #: positions at which a chunk ends, because a boundary is captured there


class ResourceGuard:
    """Releases everything once, in reverse order of acquisition, whatever the way out (C6)."""

    def __init__(self) -> None:
        self._releases: list[Callable[[], None]] = []
        self.released = False

    def add(self, release: Callable[[], None]) -> None:
        """Own one more thing. Raises EngineFault after `release`."""
        if self.released:
            raise EngineFault("a released guard was given a resource")
        self._releases.append(release)

    def release(self) -> None:
        """Give everything back; a second call does nothing. One failing release does not keep the others."""
        self.released = True
        faults: list[EngineFault] = []
        while self._releases:
            try:
                self._releases.pop()()
            except EngineFault as fault:
                faults.append(fault)
        if faults:
            raise faults[0]


@dataclass(kw_only=True, slots=True)
class SequenceState:
    """What the cache holds for one sequence: rows 0..seq_len-1 of its blocks, and one recurrent slot.

    Plain decode and every session advance this one state; a session adds only a drafter and a sampling history.
    """

    tokens: list[int] = field(default_factory=list)  #: committed ids, one a cache row
    prompt_len: int | None = None  #: set by the first prefill, then fixed; splits prompt from generated rows
    block_table: list[int] = field(default_factory=list)
    """Entry i holds rows 64 i ..; one reference held on each."""
    slot_idx: int | None = None  #: recurrent slot, a fixed address; null for host-only states
    kv_valid_tokens: int = 0
    """Rows that were written in every layer of the trunk; nothing above is ever cached."""
    draft_valid_tokens: int = 0
    """The same of the draft plane, what its drafter knows and will write included."""
    layer_states: tuple[int | None, ...] = ()
    """One a layer: the slot that its recurrent state or ring is in; null for attention over all rows, which are in the
    blocks (R-Q3)."""
    chunked_prefill_meta: ChunkedPrefillMeta | None = None
    """Made by the first chunk, gone with the sequence (R-Q11)."""
    adapter_id: int = 0  #: part of the prefix key; 0 leaves the key unchanged
    marconi_skip_to: int = 0  #: position restored by the lookup of chunk 0; rows below are never computed
    marconi_exact_snap: int | None = None
    """The snapshot that the whole prompt was restored from: the first token is decided from the hidden stored with it,
    and the state, which has seen the last prompt token already, is not advanced over it again (R-Q6)."""
    mtp_store_gen: int = 0  #: drawn for every admission; 0 is nobody's and matches nothing (R-Q9)
    mtp_capture_gen: int = 0
    """The admission whose chunk 0 began the hidden that the first draft row is paired with (R-Q8)."""
    cached_prefix_tokens: int = 0  #: `usage.prompt_tokens_details.cached_tokens`, of the first admission
    cached_prefix_blocks: int = 0  #: leading blocks that came from the tree; not referenced again on insert
    prefix_ref_tokens: int = 0  #: rows whose blocks are referenced though `tokens` may still be empty
    prefix_lookup_applied: bool = False  #: a retried chunk 0 replays the decision instead of asking again
    session_hash: int = 0  #: owner of what is kept of it; 0 = untracked: nothing is kept and nothing restored
    proposer_state: ProposerState | None = None  #: the drafter's, when it was kept; null without a head
    last_decode_ckpt_block: int | None = None
    """Block of the newest decode checkpoint; null before the first (R-Q17)."""
    from_decode: bool = False
    """Goes on from decode-made rows of another turn: nothing of it is published (C1.3)."""
    collect_prompt_logprobs: int | None = None
    """Alternatives to list of every prompt row; null = none are made."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  #: entry i scores prompt token i + 1
    guard: ResourceGuard = field(default_factory=ResourceGuard)

    @classmethod
    def host_only(cls) -> SequenceState:
        """All defaults, no resources; releasing it does nothing (R-Q24)."""
        return cls()

    @property
    def seq_len(self) -> int:
        """Committed rows: the position of the next row."""
        return len(self.tokens)

    def begin_prompt(self, length: int) -> None:
        """Note the prompt's length at the first prefill. Raises EngineFault when a later one says another (R-Q1)."""
        if self.prompt_len not in (None, length):
            raise EngineFault(f"a prompt of {self.prompt_len} tokens became one of {length}")
        if self.prompt_len is None:
            self.mtp_capture_gen = self.mtp_store_gen
        self.prompt_len = length

    @property
    def hidden_is_own(self) -> bool:
        """Whether the hidden that waits for a drafter was begun by this admission. Sessions share no buffer, so it
        always is; the stamps are the guard that shows it (R-Q8, R-Q9)."""
        return self.mtp_store_gen != 0 and self.mtp_capture_gen == self.mtp_store_gen

    def hss_window_start(self) -> int:
        """First logical block of the table that is on the device: nothing is swapped out (R-Q25). The rows of sliding
        layers are in the slot's ring, which answers for them (`RingPool.block_for`)."""
        return 0

    def physical_block_for(self, logical: int) -> int | None:
        """The block that holds rows 64 `logical` on; null = none on the device."""
        index = logical - self.hss_window_start()
        return self.block_table[index] if 0 <= index < len(self.block_table) else None

    @property
    def rows_left(self) -> int:
        """Rows that the blocks have room for beyond the committed ones."""
        return len(self.block_table) * BLOCK_ROWS - self.seq_len

    def ssm_slot_idx(self) -> int:
        """The slot, for a sequence that must have one. Raises EngineFault on a host-only state, and once the slot was
        given back: it may be another's by now (FR-18)."""
        if self.slot_idx is None or self.guard.released:
            raise EngineFault("a host-only sequence has no recurrent slot")
        return self.slot_idx

    def apply_hit(self, tokens: list[int], blocks: list[int]) -> None:
        """Take over a restored prefix: `tokens` on the grid, its blocks already referenced for this sequence.

        A retry with the same prefix changes nothing (R-Q15).
        """
        if self.prefix_lookup_applied:
            return
        if len(tokens) != len(blocks) * BLOCK_ROWS:
            raise EngineFault(f"{len(blocks)} blocks cannot hold a prefix of {len(tokens)} tokens")
        self.prefix_lookup_applied = True
        self.block_table[:0] = blocks
        self.tokens[:] = tokens
        self.kv_valid_tokens = self.draft_valid_tokens = self.prefix_ref_tokens = len(tokens)
        self.marconi_skip_to = self.cached_prefix_tokens = len(tokens)
        self.cached_prefix_blocks = len(blocks)

    def go_on_from(self, tokens: Sequence[int], blocks: list[int], *, draft_rows: bool) -> None:
        """Take over rows that were kept of a decoding sequence: `blocks` are referenced for this one already, and the
        fresh ones behind them cover the rest of `tokens`. `draft_rows` = the draft plane has them too."""
        self.block_table[:0] = blocks
        if self.tokens or len(tokens) > len(self.block_table) * BLOCK_ROWS:
            raise EngineFault(f"{len(self.block_table)} blocks cannot go on from {len(tokens)} rows")
        self.tokens.extend(tokens)
        self.kv_valid_tokens = self.prefix_ref_tokens = len(tokens)
        self.prefix_lookup_applied = True
        self.draft_valid_tokens = len(tokens) if draft_rows else 0

    def plan_prefill(self, cuts: Sequence[int]) -> ChunkedPrefillMeta:
        """Note what holds for every chunk; the guard forgets it with the rest."""
        self.chunked_prefill_meta = ChunkedPrefillMeta(cuts=tuple(cuts))
        self.guard.add(self._forget_plan)
        return self.chunked_prefill_meta

    def _forget_plan(self) -> None:
        self.chunked_prefill_meta = None

    def commit(self, tokens: list[int] | tuple[int, ...], *, draft_rows: bool = True) -> None:
        """Append rows that the cache holds now; `draft_rows` = the draft plane has them too.

        Raises EngineFault when the block table does not cover them, as none does once the blocks were given back: a
        late result reaches nobody (FR-18).
        """
        if self.seq_len + len(tokens) > len(self.block_table) * BLOCK_ROWS:
            raise EngineFault(f"row {self.seq_len + len(tokens)} lies outside {len(self.block_table)} blocks")
        whole = draft_rows and self.draft_valid_tokens == self.seq_len
        self.tokens.extend(tokens)
        self.kv_valid_tokens = self.seq_len
        if whole:
            self.draft_valid_tokens = self.seq_len
