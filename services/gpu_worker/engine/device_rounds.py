"""Rounds that a card runs whole: drafts of whoever drafts, verify, pick, walk, and all that the next round starts from.

    draft      each sequence's drafts are made by the head, by the block drafter, or are there already (`device_drafts`)
    verify     the anchor and the drafts; picks of every column by the stream's own rules; the accepted ones counted
    advance    positions, pending rows, the fold, the next anchor: on the card, so that rounds follow one another unasked

One graph a `Round`, which is a size and who drafts in it. The host fills a sequence in once, writes block tables ahead of
its rows, and reads picks and accepted counts, one small copy a round. What drafters read of the accepted rows stays at a
fixed address for the next round: hiddens after the final norm for the head, outputs of the tapped layers for the block
drafter. A stop id ends the walk where it stands; `left` clamps the columns to the budget: a sequence without any is
padding from then on. So no row ever lies past the public stream (C1.5).

Only for streams that `sampling.device_pickable` allows: a stream has one program from its beginning to its end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import sampling
from kernels.advance import NO_STOP, STOPS, RoundState, advance
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.device_drafts import BlockDrafts, HeadDrafts
from services.gpu_worker.engine.flights import Round
from services.gpu_worker.engine.graphs import GraphCache
from services.gpu_worker.engine.inputs import RoundInputs
from services.gpu_worker.engine.layers.steps import DecodeStep
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.family import Model


class Told(NamedTuple):
    """What the host tells of sequences that begin a run of rounds, views of one buffer: a copy brings it all. The first
    five are `RoundState`'s; of the others, int32 [most]:

    by      who makes the sequence's drafts, a `By`
    unread  accepted rows of the last round, whose taps the block drafter has not taken in
    low     the oldest row that its ring has
    rungs   columns of the widest verify on the ladder; 0 = the width does not follow the last round's luck
    """

    tail_tokens: Tensor
    stops: Tensor
    tail_counts: Tensor
    left: Tensor
    wide: Tensor
    by: Tensor
    unread: Tensor
    low: Tensor
    rungs: Tensor

    @staticmethod
    def room(most: int, columns: int) -> int:
        """Elements of the buffer."""
        return most * (columns + STOPS + 7)

    @classmethod
    def of(cls, buffer: Tensor, most: int, columns: int) -> Told:
        """The views of a buffer of `room` elements."""
        tokens, stops, *rest = torch.split(buffer, [most * columns, most * STOPS, *[most] * 7])
        return cls(tokens.view(most, columns), stops.view(most, STOPS), *rest)


class DeviceRounds:
    """Rounds of up to `inputs.sequences` sequences with `inputs.columns` - 1 drafts each."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        states: StatePool,
        inputs: RoundInputs,
        *,
        ring: RingPool | None = None,
        block: BlockContext | None = None,
        truncate: bool = True,
    ) -> None:
        """`ring` = of the sliding layers, if there are any; `block` = what a block drafter keeps, null = there is none."""
        self._model = model
        self._kv = kv
        self._states = states
        self._ring = ring
        self.inputs = inputs
        most, device = inputs.sequences, kv.k.device

        self.buffer = torch.zeros(Told.room(most, inputs.columns), dtype=torch.int32, device=device)
        self.told = told = Told.of(self.buffer, most, inputs.columns)
        told.stops.fill_(NO_STOP)
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
        self._taps = block.dims.taps if block is not None else ()
        width = len(self._taps) * model.dims.hidden
        self.tail_taps = torch.zeros(most, inputs.columns, width, dtype=kv.k.dtype, device=device)
        """[most, C, taps * H]: the tapped outputs of the last round's rows."""
        self._head = HeadDrafts(model, kv, inputs, self.state, told.by, self.rules)
        self._blocks = (
            BlockDrafts(block, inputs, self.state, told, self.tail_taps, self.rules)
            if block is not None
            else None
        )
        self.graphs: GraphCache[Round] = GraphCache(self.launch, self.clear, enabled=states.placement.graphs)

    def clear(self) -> None:
        """Only padding."""
        self.inputs.fill([], [], (self.inputs.sequences, self.inputs.columns))
        self.state.left.zero_()
        self.state.tail_counts.zero_()
        self.told.unread.zero_()

    @torch.no_grad()
    def launch(self, size: Round) -> Tensor:
        """One round of the first sequences: int32 [S, 2 T], each sequence's picks, its drafts, then the rows that it
        commits (0 = padding). With a block drafter one more, the columns that it had: a draft that its drafter does not
        believe in is not verified."""
        if size.block and self._blocks is not None:
            self._blocks.draft(size)
        if size.head:
            self._head.draft(size)
        return self.verify(size)

    def verify(self, size: Round) -> Tensor:
        """The same over drafts that are in the ids already."""
        sequences, columns = size.sequences, size.columns
        ids = self.inputs.ids[: sequences * columns].view(sequences, columns)
        hidden = self._trunk(size)
        plan = self.rules.of(self.inputs.starts[:sequences], columns)
        picks = sampling.pick(self._model.logits(hidden), plan).ids.view(sequences, columns)
        return self.ended(size, picks, ids, hidden.view(sequences, columns, -1))

    def ended(self, size: Round, picks: Tensor, ids: Tensor, hidden: Tensor) -> Tensor:
        """Commit what stands and say where the next round starts; see `launch`."""
        verified = self.state.counts[: size.sequences].clone() if size.block else None
        told = advance(self.state, picks, ids, hidden, decreed=self.forced)
        if verified is None or self._blocks is None:
            return told
        self._blocks.advance(told[:, -1])
        return torch.cat([told, verified[:, None]], dim=1)

    def _trunk(self, size: Round) -> Tensor:
        """[S * T, H]; the tapped layers' outputs are kept."""
        sequences, columns = size.sequences, size.columns
        embedded = self._model.embed(self.inputs.ids[: sequences * columns])
        step = self._step((sequences, columns))
        if not self._taps:
            return self._model.trunk(embedded, step)
        taps = Taps(self._taps)
        hidden = self._model.trunk(embedded, step, taps)
        self.tail_taps[:sequences, :columns].copy_(taps.rows().view(sequences, columns, -1))
        return hidden

    def _step(self, size: tuple[int, int]) -> DecodeStep:
        inputs, model = self.inputs, self._model
        attention = inputs.attention(self._kv, model.rope, size, inputs.blocks)
        local = None
        if model.local_rope is not None and self._ring is not None:
            local = inputs.local(self._ring, model.local_rope, size, inputs.blocks)
        return inputs.decode(attention, self._states, size, local)
