"""Launches of decode rows, as the device wants them: index tensors made anew (twin), or fixed addresses and graphs (card).

Both answer [sequences * columns, H], where columns is how far each sequence was padded. Rows, spans and slots were checked
by the runner. Which of the two a runner has is decided by the pools' placement, at its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.gated_delta import CardReplay, ReplayPlan
from kernels.paged_attention import SPLIT_ROWS, CardAttention
from kernels.tiles import ROWS
from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.graphs import GraphCache, Size, bucket
from services.gpu_worker.engine.inputs import RoundInputs, card_attention
from services.gpu_worker.engine.layers.local import local_decode, local_prefill
from services.gpu_worker.engine.layers.steps import (
    DecodeStep,
    PrefillStep,
    Span,
    decode_attention,
    prefill_attention,
)
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.models.family import Model
from shared.errors import EngineFault

DRAFT_BACKLOG: Final = 8
"""Rows of the draft plane beyond a verify's that one call may bring."""


class Rows(NamedTuple):
    """What a launch gave: hidden [sequences * columns, H]."""

    hidden: Tensor
    columns: int


class Launches(Protocol):
    """What the runner asks of either."""

    uncaptured: bool
    """Whether the last verify wanted a graph that could not be captured."""
    tapped: Tensor | None
    """[sequences * columns, taps * H] of the last verify, if a row of it asked for taps."""

    def verify(self, rows: Sequence[VerifyRows], spans: Sequence[Span]) -> Rows: ...

    def draft(self, rows: Sequence[DraftRows], spans: Sequence[Span]) -> Rows: ...

    def prefill(self, chunk: PrefillChunk, span: Span) -> tuple[PrefillStep, Tensor]:
        """The step of a prompt chunk and its padded ids [n]."""
        ...

    def fold(self, slot: int, pending: int) -> ReplayPlan: ...


def launches(
    model: Model,
    kv: KVPool,
    states: StatePool,
    ring: RingPool,
    config: EngineConfig,
    taps: Sequence[int] = (),
) -> Launches:
    """As the pools' placement wants them. `taps` = layers whose outputs a drafter reads."""
    if states.placement.on_card:
        return CardLaunches(model, kv, states, ring, config, taps)
    return TwinLaunches(model, kv, states, ring, taps)


class TwinLaunches:
    """Index tensors made for each launch; the columns are the longest sequence's."""

    uncaptured = False

    def __init__(
        self, model: Model, kv: KVPool, states: StatePool, ring: RingPool, taps: Sequence[int] = ()
    ) -> None:
        self.tapped: Tensor | None = None
        self._taps = tuple(taps)
        self._model = model
        self._kv = kv
        self._states = states
        self._ring = ring

    def verify(self, rows: Sequence[VerifyRows], spans: Sequence[Span]) -> Rows:
        """One batched verify."""
        attention = decode_attention(spans, self._kv, self._model.rope)
        states, slots = self._states, [row.slot for row in rows]
        plan = ReplayPlan.build(
            slots,
            [states.fold(slot) for slot in slots],
            attention.columns,
            states.max_verify,
            states.num_slots,
            states.taps,
        )
        local = local_decode(spans, slots, self._ring, self._model.local_rope)
        embedded = self._embed([row.tokens for row in rows], attention.columns)
        taps = Taps(self._taps) if self._taps and any(row.tap for row in rows) else None
        hidden = self._model.trunk(embedded, DecodeStep(attention, states, plan, local), taps)
        self.tapped = taps.rows() if taps is not None else None
        return Rows(hidden, attention.columns)

    def draft(self, rows: Sequence[DraftRows], spans: Sequence[Span]) -> Rows:
        """One call of the MTP head."""
        assert self._model.mtp is not None
        step = decode_attention(spans, self._kv, self._model.rope)
        hiddens = torch.zeros(len(rows), step.columns, self._model.dims.hidden)
        for number, row in enumerate(rows):
            hiddens[number, : len(row.tokens)] = row.hiddens
        embedded = self._embed([row.tokens for row in rows], step.columns)
        return Rows(self._model.mtp(embedded, hiddens.view(len(embedded), -1), step), step.columns)

    def prefill(self, chunk: PrefillChunk, span: Span) -> tuple[PrefillStep, Tensor]:
        """Tiles of 64 rows, one plan each."""
        attention = prefill_attention(span, self._kv, self._model.rope)
        local = local_prefill(span, chunk.slot, self._ring, self._model.local_rope)
        ids = _padded([chunk.tokens], attention.columns)
        return PrefillStep(attention, self._states, chunk.slot, span.count, local), ids

    def fold(self, slot: int, pending: int) -> ReplayPlan:
        """Only fold the slot's pending rows."""
        return ReplayPlan.build([slot], [pending], 0, self._states.max_verify, self._states.num_slots)

    def _embed(self, tokens: Sequence[Sequence[int]], columns: int) -> Tensor:
        return self._model.embed(_padded(tokens, columns))


class CardLaunches:
    """Rounds padded up to powers of two and replayed as graphs, prompt chunks launched as they come."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        states: StatePool,
        ring: RingPool,
        config: EngineConfig,
        taps: Sequence[int] = (),
    ) -> None:
        self.tapped: Tensor | None = None
        self._taps = tuple(taps)
        self._model = model
        self._kv = kv
        self._states = states
        self._ring = ring
        self._device = kv.k.device
        self._blocks = -(-min(config.max_context, model.dims.max_positions) // ROWS)
        self._most = (config.max_batch, states.max_verify)
        graphs = states.placement.graphs
        self.inputs = RoundInputs(*self._most, self._blocks, self._device, states.scratch)
        self.uncaptured = False
        rows, width = self._most[0] * self._most[1], len(self._taps) * model.dims.hidden
        self._tap_rows = torch.zeros(rows, width, dtype=kv.k.dtype, device=self._device)
        self._verifies: GraphCache[Size] = GraphCache(self.launch_verify, self.clear, enabled=graphs)
        widest = states.max_verify + DRAFT_BACKLOG
        self._draft_rows = RoundInputs(config.max_batch, widest, self._blocks, self._device, states.scratch)
        self._hiddens = torch.zeros(
            config.max_batch * widest, model.dims.hidden, dtype=kv.k.dtype, device=self._device
        )
        self._drafts: GraphCache[Size] = GraphCache(
            self._draft, lambda: self._draft_rows.fill([], [], (config.max_batch, widest)), enabled=graphs
        )

    def verify(self, rows: Sequence[VerifyRows], spans: Sequence[Span]) -> Rows:
        """One batched verify, eager when a row asks for it."""
        size = self._size(spans, *self._most)
        eager = any(row.eager for row in rows)
        self.uncaptured = not eager and self._verifies.enabled and not self._verifies.prepare(size)
        slots = [row.slot for row in rows]
        self.inputs.fill(spans, [row.tokens for row in rows], size, slots, self._states)
        hidden = self._verifies.run(size, eager=eager).clone()
        wanted = bool(self._taps) and any(row.tap for row in rows)
        self.tapped = self._tap_rows[: size[0] * size[1]].clone() if wanted else None
        return Rows(hidden, size[1])

    def draft(self, rows: Sequence[DraftRows], spans: Sequence[Span]) -> Rows:
        """Rows of the draft plane: one call of the MTP head, or several where a sequence brings more than a call holds."""
        most, widest = self._draft_rows.columns, max(span.count for span in spans)
        if widest <= most:
            return self._draft_once(rows, spans)
        hidden = torch.zeros(
            len(rows), widest, self._hiddens.shape[1], dtype=self._hiddens.dtype, device=self._device
        )
        for first in range(0, widest, most):
            numbers = [number for number, span in enumerate(spans) if span.count > first]
            part = [rows[number].part(first, first + most) for number in numbers]
            made = self._draft_once(part, [Span(row.start, len(row.tokens), row.block_table) for row in part])
            shaped = made.hidden.view(-1, made.columns, hidden.shape[2])
            for place, (number, row) in enumerate(zip(numbers, part, strict=True)):
                hidden[number, first : first + len(row.tokens)] = shaped[place, : len(row.tokens)]
        return Rows(hidden.flatten(0, 1), widest)

    def _draft_once(self, rows: Sequence[DraftRows], spans: Sequence[Span]) -> Rows:
        inputs = self._draft_rows
        size = self._size(spans, inputs.sequences, inputs.columns)
        self._drafts.prepare(size)
        inputs.fill(spans, [row.tokens for row in rows], size)
        hiddens = self._hiddens[: size[0] * size[1]].view(*size, -1)
        for number, row in enumerate(rows):
            hiddens[number, : len(row.tokens)] = row.hiddens.to(hiddens.device, hiddens.dtype)
        return Rows(self._drafts.run(size).clone(), size[1])

    def prefill(self, chunk: PrefillChunk, span: Span) -> tuple[PrefillStep, Tensor]:
        """One plan for all rows of the chunk."""
        rows = -(-span.count // ROWS) * ROWS
        blocks = -(-(span.start + span.count) // ROWS)
        table = list(span.block_table[:blocks])
        ring = self._ring.table(chunk.slot)[:blocks] if self._model.local_rope is not None else []
        told = self._tensor([span.start, span.count, *table, *ring])
        card = CardAttention(
            block_tables=told[2 : 2 + blocks].view(1, -1),
            starts=told[:1],
            counts=told[1:2],
            columns=rows,
            max_splits=-(-blocks * ROWS // SPLIT_ROWS),
            prefill=True,
        )
        positions = torch.arange(span.start, span.start + rows, device=self._device)
        positions.clamp_(max=self._model.rope.shape[0] - 1)
        attention = card_attention(
            card, self._kv, self._model.rope.index_select(0, positions), 1, prefill=True
        )
        local = None
        if self._model.local_rope is not None:
            sliding = replace(card, block_tables=told[2 + blocks :].view(1, -1), window=self._ring.window)
            turned = self._model.local_rope.index_select(0, positions)
            local = card_attention(sliding, self._ring, turned, 1, prefill=True)
        ids = _padded([chunk.tokens], rows).to(self._device, non_blocking=True)
        return PrefillStep(attention, self._states, chunk.slot, span.count, local), ids

    def fold(self, slot: int, pending: int) -> ReplayPlan:
        """Only fold the slot's pending rows."""
        told = self._tensor([slot, pending, self._states.head(slot), 1, 0])
        return ReplayPlan.for_card(
            CardReplay(
                slots=told[:1],
                pending=told[1:2],
                head=told[2:3],
                store_after=told[3:4],
                counts=told[4:],
                columns=0,
            )
        )

    def clear(self) -> None:
        """Put padding into the inputs of verifies."""
        self.inputs.fill([], [], self._most)

    def launch_verify(self, size: Size) -> Tensor:
        """What a graph of a verify holds: hidden [S * T, H] of what the inputs say."""
        attention = self.inputs.attention(self._kv, self._model.rope, size, self._blocks)
        local = None
        if self._model.local_rope is not None:
            local = self.inputs.local(self._ring, self._model.local_rope, size, self._blocks)
        step = self.inputs.decode(attention, self._states, size, local)
        embedded = self._model.embed(self.inputs.ids[: size[0] * size[1]])
        if not self._taps:
            return self._model.trunk(embedded, step)
        taps = Taps(self._taps)
        hidden = self._model.trunk(embedded, step, taps)
        self._tap_rows[: len(hidden)].copy_(taps.rows())
        return hidden

    def _draft(self, size: Size) -> Tensor:
        assert self._model.mtp is not None
        count = size[0] * size[1]
        attention = self._draft_rows.attention(self._kv, self._model.rope, size, self._blocks)
        return self._model.mtp(
            self._model.embed(self._draft_rows.ids[:count]), self._hiddens[:count], attention
        )

    def _size(self, spans: Sequence[Span], sequences: int, columns: int) -> Size:
        widest = max(span.count for span in spans)
        if len(spans) > sequences or widest > columns:
            raise EngineFault(f"a launch of {len(spans)} x {widest} rows: at most {sequences} x {columns}")
        return bucket(len(spans), sequences), bucket(widest, columns)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self._device, non_blocking=True)


def _padded(tokens: Sequence[Sequence[int]], columns: int) -> Tensor:
    """Tokens of each sequence, padded with id 0 to `columns`: [sequences * columns]."""
    return torch.tensor([token for row in tokens for token in (*row, *(0,) * (columns - len(row)))])
