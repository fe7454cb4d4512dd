"""Drafts that are made where the verify runs: by a head's chain or by a block drafter's pass, into columns 1.. of the ids.

    head    the draft plane's rows of what the last round decided, whose last one proposes the first draft; then one row a
            draft, each from the one before it
    block   the last round's accepted rows become context rows in the slots' rings; one pass over anchors and masks; the
            drafts are picked from its output left to right (`models.block_walk`)

Either runs over all sequences of a round and keeps to those whose drafts are its own (`By`): the others' ids stay. Its rows
of padding, and of rejected columns, go where nobody reads. Drafts are picked by the target's own rules and noise (C1.4).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels import sampling
from kernels.advance import RoundState
from kernels.paged_attention import SPLIT_ROWS, CardAttention
from kernels.sampling import PickPlan
from kernels.tiles import ROWS
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.drafters.ladder import LEAST_COLUMNS
from services.gpu_worker.engine.flights import By, Round
from services.gpu_worker.engine.inputs import RoundInputs, card_attention
from services.gpu_worker.engine.layers.steps import AttentionStep
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.family import Model


class HeadDrafts:
    """The MTP head's, `size.head` of them a sequence."""

    def __init__(
        self, model: Model, kv: KVPool, inputs: RoundInputs, state: RoundState, by: Tensor, rules: PickPlan
    ) -> None:
        self._model, self._kv, self._inputs, self._state = model, kv, inputs, state
        self._by, self._rules = by, rules
        device = kv.k.device
        self._steps = torch.arange(inputs.columns, dtype=torch.int32, device=device)
        self._rows = torch.arange(inputs.sequences, device=device)
        self._splits = -(-inputs.blocks * ROWS // SPLIT_ROWS)

    def draft(self, size: Round) -> None:
        """Fill columns 1 to `size.head`."""
        sequences, columns = size.sequences, size.columns
        state, own = self._state, self._by[:sequences] == By.HEAD
        starts, tail = state.starts[:sequences], state.tail_counts[:sequences]
        ids = self._inputs.ids[: sequences * columns].view(sequences, columns)
        live = ((state.counts[:sequences] > 0) & own).int()
        tokens, hiddens = state.tail_tokens[:sequences, :columns], state.tail_hidden[:sequences, :columns]
        step = self._attention(starts - tail + 1, tail * live, columns)
        rows = self._head(tokens.flatten(), hiddens.flatten(0, 1), step)
        last = (self._rows[:sequences] * columns + tail.clamp_min(1)) - 1
        hidden = rows.index_select(0, last)
        for depth in range(1, size.head + 1):
            at = starts + (depth - 1)
            if depth > 1:
                hidden = self._head(ids[:, depth - 1].contiguous(), hidden, self._attention(at, live, 1))
            plan = self._rules.of(at, 1)
            picked = sampling.pick(self._model.draft_logits(hidden), plan).ids
            ids[:, depth] = torch.where(own, picked.clamp_min(0), ids[:, depth])

    def _head(self, tokens: Tensor, hiddens: Tensor, step: AttentionStep) -> Tensor:
        assert self._model.mtp is not None
        return self._model.mtp(self._model.embed(tokens), hiddens, step)

    def _attention(self, starts: Tensor, counts: Tensor, columns: int) -> AttentionStep:
        rope = self._model.rope
        positions = (starts[:, None] + self._steps[:columns]).flatten().clamp_(0, rope.shape[0] - 1)
        card = CardAttention(
            block_tables=self._inputs.tables[: len(starts)],
            starts=starts,
            counts=counts,
            columns=columns,
            max_splits=self._splits,
        )
        return card_attention(card, self._kv, rope.index_select(0, positions), len(starts))


class BlockTold(Protocol):
    """What the host tells of sequences that a block drafter drafts for; see `device_rounds.Told`."""

    @property
    def by(self) -> Tensor: ...

    @property
    def unread(self) -> Tensor: ...

    @property
    def low(self) -> Tensor: ...

    @property
    def rungs(self) -> Tensor: ...


class BlockDrafts:
    """The block drafter's, as many as the round has columns for. The context's books are the host's (`BlockContext`), who
    notes the same rows when it reads the round."""

    def __init__(
        self,
        context: BlockContext,
        inputs: RoundInputs,
        state: RoundState,
        told: BlockTold,
        tail_taps: Tensor,
        rules: PickPlan,
    ) -> None:
        self._context, self._inputs, self._state = context, inputs, state
        self._told, self._tail_taps, self._rules = told, tail_taps, rules
        self._steps = torch.arange(inputs.columns, dtype=torch.int32, device=tail_taps.device)

    def draft(self, size: Round) -> None:
        """Take the last round's rows in, fill columns 1.., and leave out the drafts that are not believed in."""
        sequences, columns = size.sequences, size.columns
        own = self._told.by[:sequences] == By.BLOCK
        self._take_in(sequences, columns, own)
        ids = self._inputs.ids[: sequences * columns].view(sequences, columns)
        starts, counts = self._state.starts[:sequences], self._state.counts[:sequences]
        slots, lows = self._inputs.slots[:sequences], self._told.low[:sequences]
        drafts, believed = self._context.draft(slots, starts, lows, ids[:, 0], columns - 1, self._rules)
        drafted = slice(1, 1 + drafts.shape[1])
        ids[:, drafted] = torch.where(own[:, None], drafts, ids[:, drafted])
        counts.copy_(torch.where(own, torch.minimum(counts, believed + 1), counts))

    def advance(self, rows: Tensor) -> None:
        """A round committed `rows` int32 [S] rows: they wait to be taken in, and a ladder's next width follows."""
        told, state, sequences = self._told, self._state, len(rows)
        told.unread[:sequences] = rows
        rungs, wide = told.rungs[:sequences], state.wide[:sequences]
        climbed = torch.minimum((rows + 1).clamp_min(LEAST_COLUMNS), rungs)
        wide.copy_(torch.where(rungs > 0, climbed, wide))
        torch.minimum(state.left[:sequences].clamp_min(0), wide, out=state.counts[:sequences])

    def _take_in(self, sequences: int, columns: int, own: Tensor) -> None:
        live = own & (self._state.counts[:sequences] > 0)
        unread, steps = self._told.unread[:sequences], self._steps[:columns]
        positions = (self._state.starts[:sequences] - unread)[:, None] + steps
        real = (steps[None, :] < unread[:, None]) & live[:, None]
        slots = torch.where(real, self._inputs.slots[:sequences, None], self._context.scratch)
        taps = self._tail_taps[:sequences, :columns].flatten(0, 1)
        self._context.take_in(taps, slots.flatten(), positions.clamp_min(0).flatten())
