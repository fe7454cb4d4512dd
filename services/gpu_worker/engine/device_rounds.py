"""Rounds that a card runs whole: drafts of the MTP head, verify, pick, walk, and all that the next round starts from.

    catch up   the draft plane's rows of what the last round decided, whose last one proposes the first draft
    draft      K - 1 more calls of the head, one row each
    verify     the anchor and K drafts; picks of every column by the stream's own rules; the accepted ones counted
    advance    positions, pending rows, the fold, the next anchor: on the card, so that rounds follow one another unasked

One graph a (sequences, K). The host fills a sequence in once, writes block tables ahead of its rows, and reads picks and
accepted counts, one small copy a round. A stop id ends the walk where it stands; `left` clamps the columns to the budget:
a sequence without any is padding from then on. So no row ever lies past the public stream (C1.5).

Only for streams that `sampling.device_pickable` allows: a stream has one program from its beginning to its end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import sampling
from kernels.advance import NO_STOP, STOPS, RoundState, advance
from kernels.paged_attention import SPLIT_ROWS, CardAttention
from kernels.tiles import ROWS
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.graphs import GraphCache, Size
from services.gpu_worker.engine.inputs import RoundInputs, card_attention
from services.gpu_worker.engine.layers.steps import AttentionStep
from services.gpu_worker.engine.models.hybrid import HybridModel


class Told(NamedTuple):
    """What the host tells of sequences that begin a run of rounds, views of one buffer: a copy brings it all. The first
    five are `RoundState`'s; `given` int32 [most], 1 = the host brought the drafts, and the head's are not asked."""

    tail_tokens: Tensor
    stops: Tensor
    tail_counts: Tensor
    left: Tensor
    wide: Tensor
    given: Tensor

    @staticmethod
    def room(most: int, columns: int) -> int:
        """Elements of the buffer."""
        return most * (columns + STOPS + 4)

    @classmethod
    def of(cls, buffer: Tensor, most: int, columns: int) -> Told:
        """The views of a buffer of `room` elements."""
        tokens, stops, *rest = torch.split(buffer, [most * columns, most * STOPS, *[most] * 4])
        return cls(tokens.view(most, columns), stops.view(most, STOPS), *rest)


class DeviceRounds:
    """Rounds of up to `inputs.sequences` sequences with `inputs.columns` - 1 drafts each."""

    def __init__(
        self, model: HybridModel, kv: KVPool, states: StatePool, inputs: RoundInputs, *, truncate: bool = True
    ) -> None:
        self._model = model
        self._kv = kv
        self._states = states
        self.inputs = inputs
        most, device = inputs.sequences, kv.k.device

        self.buffer = torch.zeros(Told.room(most, inputs.columns), dtype=torch.int32, device=device)
        told = Told.of(self.buffer, most, inputs.columns)
        told.stops.fill_(NO_STOP)
        self.given = told.given
        self.state = RoundState(
            starts=inputs.starts,
            counts=inputs.counts,
            left=told.left,
            wide=told.wide,
            stops=told.stops,
            pending=inputs.pending,
            head=inputs.head,
            store_after=inputs.store_after,
            tail_tokens=told.tail_tokens,
            tail_counts=told.tail_counts,
            tail_hidden=torch.zeros(most, inputs.columns, model.dims.hidden, dtype=kv.k.dtype, device=device),
            capacity=states.capacity,
            fold_rows=states.placement.fold_rows,
        )
        self.rules = sampling.PickPlan.empty(most, inputs.columns, device=device, truncate=truncate)
        self.forced: Tensor | None = None
        """Accepted drafts by decree, int32 [most]: for a benchmark of random weights, which never agree. Null = real."""
        self._steps = torch.arange(inputs.columns, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, device=device)
        self._splits = -(-inputs.blocks * ROWS // SPLIT_ROWS)
        self.graphs = GraphCache(self.launch, self.clear, enabled=states.placement.graphs)
        self.verifies = GraphCache(self.verify, self.clear, enabled=states.placement.graphs)

    def clear(self) -> None:
        """Only padding."""
        self.inputs.fill([], [], (self.inputs.sequences, self.inputs.columns))
        self.state.left.zero_()
        self.state.tail_counts.zero_()

    @torch.no_grad()
    def launch(self, size: Size) -> Tensor:
        """One round of the first `size[0]` sequences with `size[1]` columns: int32 [S, 2 T], each sequence's picks, its
        drafts, then the rows that it commits (0 = padding)."""
        if size[1] > 1:
            self._draft(*size)
        return self.verify(size)

    @torch.no_grad()
    def verify(self, size: Size) -> Tensor:
        """The same over drafts that are in the ids already."""
        sequences, columns = size
        ids = self.inputs.ids[: sequences * columns].view(sequences, columns)
        counts = self.inputs.counts[:sequences]
        attention = self._attention(self.inputs.starts[:sequences], counts, columns)
        step = self.inputs.decode(attention, self._states, size)
        hidden = self._model.trunk(self._model.embed(ids.flatten()), step)
        plan = self.rules.of(self.inputs.starts[:sequences], columns)
        picks = sampling.pick(self._model.logits(hidden), plan).ids.view(sequences, columns)
        hidden = hidden.view(sequences, columns, -1)
        return advance(self.state, picks, ids, hidden, decreed=self.forced)

    def _draft(self, sequences: int, columns: int) -> None:
        """Fill columns 1.. of the ids."""
        state = self.state
        starts, tail = state.starts[:sequences], state.tail_counts[:sequences]
        ids = self.inputs.ids[: sequences * columns].view(sequences, columns)
        live = (state.counts[:sequences] > 0).int()
        tokens, hiddens = state.tail_tokens[:sequences, :columns], state.tail_hidden[:sequences, :columns]
        step = self._attention(starts - tail + 1, tail * live, columns)
        rows = self._head(tokens.flatten(), hiddens.flatten(0, 1), step)
        last = (self._rows[:sequences] * columns + tail.clamp_min(1)) - 1
        hidden = rows.index_select(0, last)
        for depth in range(1, columns):
            at = starts + (depth - 1)
            if depth > 1:
                hidden = self._head(ids[:, depth - 1].contiguous(), hidden, self._attention(at, live, 1))
            plan = self.rules.of(at, 1)
            picked = sampling.pick(self._model.draft_logits(hidden), plan).ids
            ids[:, depth] = torch.where(self.given[:sequences] > 0, ids[:, depth], picked.clamp_min(0))

    def _head(self, tokens: Tensor, hiddens: Tensor, step: AttentionStep) -> Tensor:
        assert self._model.mtp is not None
        return self._model.mtp(self._model.embed(tokens), hiddens, step)

    def _attention(self, starts: Tensor, counts: Tensor, columns: int) -> AttentionStep:
        rope = self._model.rope
        positions = (starts[:, None] + self._steps[:columns]).flatten().clamp_(0, rope.shape[0] - 1)
        card = CardAttention(
            block_tables=self.inputs.tables[: len(starts)],
            starts=starts,
            counts=counts,
            columns=columns,
            max_splits=self._splits,
        )
        return card_attention(card, self._kv, rope.index_select(0, positions), len(starts))
