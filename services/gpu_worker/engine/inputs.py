"""The inputs of a round on a card: int32 tensors that keep their address, filled by the host, read by one forward.

A round has S sequences of T columns, both padded up to a captured size. Everything that the host tells lies in one
buffer, so that a round costs one small copy; block tables, which seldom change, lie in another, copied when they did. A
padded sequence has count 0 and the scratch slot, a padded column is a row beyond its sequence's count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.gated_delta import CardReplay, ReplayPlan
from kernels.paged_attention import SPLIT_ROWS, AttentionPlan, CardAttention
from kernels.tiles import ROWS
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.layers.steps import AttentionStep, DecodeStep, Span

_PER_SEQUENCE: Final = ("starts", "counts", "slots", "pending", "head", "store_after")


class RoundInputs:
    """Room for `sequences` x `columns` rows over tables of `blocks` blocks. One writer, the thread of the engine."""

    def __init__(self, sequences: int, columns: int, blocks: int, device: torch.device, scratch: int) -> None:
        """`scratch` = the slot of padded sequences."""
        self.sequences = sequences
        self.columns = columns
        self.blocks = blocks
        self._scratch = scratch
        pinned = device.type == "cuda"
        small = sequences * (columns + len(_PER_SEQUENCE))
        self._host = torch.zeros(small, dtype=torch.int32, pin_memory=pinned)
        self._card = torch.zeros(small, dtype=torch.int32, device=device)
        self._host_tables = torch.zeros(sequences, blocks, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(sequences, blocks, dtype=torch.int32, device=device)
        self._seen: list[list[int]] = [[] for _ in range(sequences)]
        self._fields = self._host[sequences * columns :].view(len(_PER_SEQUENCE), sequences).numpy()
        self._ids = self._host[: sequences * columns].numpy()
        per_sequence = self._card[sequences * columns :].view(len(_PER_SEQUENCE), sequences)
        self.ids = self._card[: sequences * columns]
        """[sequences * columns]; a round of S x T uses the first S * T."""
        self.starts, self.counts, self.slots, self.pending, self.head, self.store_after = per_sequence.unbind(
            0
        )
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def fill(
        self,
        spans: Sequence[Span],
        tokens: Sequence[Sequence[int]],
        size: tuple[int, int],
        slots: Sequence[int] | None = None,
        states: StatePool | None = None,
    ) -> None:
        """Write a round of `spans` and send it on its way. `size` = (S, T) that it is padded to; without `slots` and
        `states` (draft rows) the recurrent side stays padding."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the round before still reads the host's buffer
        count, (padded, columns) = len(spans), size
        ids, fields = self._ids[: padded * columns].reshape(padded, columns), self._fields
        ids[:] = 0
        fields[:, :padded] = 0
        fields[2, :padded] = self._scratch
        for row, (span, own) in enumerate(zip(spans, tokens, strict=True)):
            ids[row, : span.count] = own
            self._table(row, span.block_table)
        fields[0, :count] = [span.start for span in spans]
        fields[1, :count] = [span.count for span in spans]
        if slots is not None and states is not None:
            fields[2, :count] = slots
            fields[3, :count] = [states.fold(slot) for slot in slots]
            fields[4, :count] = [states.head(slot) for slot in slots]
            fields[5, :count] = [states.stores(slot) for slot in slots]
        self._card.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def refresh(self, tables: Sequence[Sequence[int] | None]) -> None:
        """Send tables that changed since the last round; null = that row keeps its own."""
        sent = [self._table(row, table) for row, table in enumerate(tables) if table is not None]
        if any(sent) and self._copied is not None:
            self._copied.record()

    def _table(self, row: int, table: Sequence[int]) -> bool:
        """Whether it had to be sent."""
        if self._seen[row] == table:
            return False
        self._seen[row] = own = list(table)
        self._host_tables[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        self.tables[row].copy_(self._host_tables[row], non_blocking=True)
        return True

    def attention(self, kv: KVPool, rope: Tensor, size: tuple[int, int], blocks: int) -> AttentionStep:
        """The attention side of a round of this size over at most `blocks` blocks; part of the captured launch."""
        return self._attention(kv, rope, size, self.tables[: size[0]], blocks)

    def local(self, ring: RingPool, rope: Tensor, size: tuple[int, int], blocks: int) -> AttentionStep:
        """The same rows as the sliding layers see them: where a ring's blocks lie follows from the slot."""
        logical = torch.arange(blocks, dtype=torch.int32, device=self.slots.device) % ring.blocks_each
        tables = self.slots[: size[0], None] * ring.blocks_each + logical
        return self._attention(ring, rope, size, tables, blocks, ring.window)

    def _attention(
        self,
        kv: KVPool | RingPool,
        rope: Tensor,
        size: tuple[int, int],
        tables: Tensor,
        blocks: int,
        window: int = 0,
    ) -> AttentionStep:
        sequences, columns = size
        starts = self.starts[:sequences]
        steps = torch.arange(columns, dtype=torch.int32, device=starts.device)
        positions = (starts[:, None] + steps).flatten().clamp_(max=rope.shape[0] - 1)
        card = CardAttention(
            block_tables=tables,
            starts=starts,
            counts=self.counts[:sequences],
            columns=columns,
            max_splits=-(-blocks * ROWS // SPLIT_ROWS),
            window=window,
        )
        return card_attention(card, kv, rope.index_select(0, positions), sequences)

    def decode(
        self,
        attention: AttentionStep,
        states: StatePool,
        size: tuple[int, int],
        local: AttentionStep | None = None,
    ) -> DecodeStep:
        """The whole step of a round of this size."""
        sequences, columns = size
        card = CardReplay(
            slots=self.slots[:sequences],
            pending=self.pending[:sequences],
            head=self.head[:sequences],
            store_after=self.store_after[:sequences],
            counts=self.counts[:sequences],
            columns=columns,
        )
        return DecodeStep(attention, states, ReplayPlan.for_card(card), local)


def card_attention(
    card: CardAttention, kv: KVPool | RingPool, cos_sin: Tensor, sequences: int, *, prefill: bool = False
) -> AttentionStep:
    """A step whose one plan covers all its rows as they lie, padding included: the kernels read the counts."""
    return AttentionStep(
        kv=kv,
        cos_sin=cos_sin,
        sequences=sequences,
        columns=card.columns,
        padded_columns=card.columns,
        plans=((slice(0, sequences * card.columns), AttentionPlan.for_card(card)),),
        real_rows=None,
        targets=card.starts,
        prefill=prefill,
    )
