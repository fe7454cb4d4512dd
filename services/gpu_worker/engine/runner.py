"""Runs the model on rows: prefill on the grid, verify (plain decode is one column), drafts of the MTP head.

Owns no memory: KV blocks and recurrent slots are the pools', and who may use which is decided above.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels import gated_delta
from kernels.tiles import ROWS
from services.gpu_worker.engine.batch import BlockAsk, DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool, delta_shape
from services.gpu_worker.engine.card_logits import CardLogits, Logits
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig, ModelDims
from services.gpu_worker.engine.faults import OutOfMemory
from services.gpu_worker.engine.flights import WholeResult, WholeRow
from services.gpu_worker.engine.layers.steps import Span
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_heads import NoRows, Proposal
from services.gpu_worker.engine.models.family import Model
from services.gpu_worker.engine.rounds import launches
from services.gpu_worker.engine.whole import WholeRounds
from shared.errors import EngineFault


@contextmanager
def memory_faults() -> Iterator[None]:
    """Turns what allocators raise when memory is short into `OutOfMemory`; everything else passes."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory("a launch did not fit into memory") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's CPU allocator has no type of its own for it
            raise
        raise OutOfMemory("a launch did not fit into memory") from error


class ModelRunner:
    """One forward a call, in the types of the model's placement. Every row's bits are a function of its sequence alone (C1).

    Misuse (a start where the slot's state is not valid, a verify before `accept`, too many rows, a short block table)
    raises `EngineFault` before anything is written; short memory raises `OutOfMemory`. Should a forward itself fail, the
    states of its slots are undefined until `StatePool.reset`.
    """

    dims: ModelDims

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        states: StatePool,
        config: EngineConfig,
        ring: RingPool | None = None,
        block: BlockContext | None = None,
    ) -> None:
        """`model` is `LoadedModel.model`; without a `ring` the runner has one of its own, whose tails nobody takes.
        `block` = what a block drafter keeps, which the runner feeds; null = there is none."""
        self.dims = model.dims
        self._model = model
        self._kv = kv
        self._states = states
        self._ring = ring or RingPool(
            model.dims.within(config.max_context),
            states.num_slots,
            0,
            prefill_rows=config.prefill_chunk,
            max_verify=states.max_verify,
            dtype=kv.k.dtype,
            device=kv.k.device,
        )
        self.block = block
        self._taps = block.dims.taps if block is not None else ()
        self._launches = launches(model, kv, states, self._ring, config, self._taps)
        self._config = config
        self._shape = delta_shape(model.dims)
        self._scale = gated_delta.qk_scale(self._shape).to(states.state.device)
        self._thread = 0
        self.uncaptured = False
        """Whether the last round wanted a graph that could not be captured, and ran without (R-S8)."""
        self._whole = self._whole_rounds()

    @memory_faults()
    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        """Run prompt rows; returns one hidden [n, H] after the final norm a chunk.

        Writes the KV rows, leaves the slot's states valid at `start + n` with fold 0 and, with an MTP head, writes the
        draft rows start..start+n-1. Several chunks of one sequence in one call run in the order given.
        """
        self._bind()
        self._make_way([chunk.slot for chunk in chunks])
        return [self._prefill(chunk) for chunk in chunks]

    @memory_faults()
    @torch.no_grad()
    def verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]:
        """Run one batched, ragged verify over distinct slots; returns one hidden [T_i, H] a sequence.

        Folds the accepted rows of each slot's last verify into its state, then runs the new rows and keeps their inputs
        for the next fold. KV rows are written before attention reads them. `accept` must follow for every slot.
        """
        self._bind()
        if not rows:
            return []
        self._make_way([row.slot for row in rows])
        self._check_verify(rows)
        spans = [Span(row.start, len(row.tokens), row.block_table) for row in rows]
        hidden, columns = self._launches.verify(rows, spans)
        self.uncaptured = self._launches.uncaptured
        for row in rows:
            self._states.verified(row.slot, len(row.tokens))
            self._ring.wrote(row.slot, row.start + len(row.tokens))
        if self.block is not None and self._launches.tapped is not None:
            tapped = _per_sequence(self._launches.tapped, spans, columns)
            for row, taps in zip(rows, tapped, strict=True):
                if row.tap:
                    self.block.seen(row.slot, row.start, taps)
        return _per_sequence(hidden, spans, columns)

    def prepare(self, drafts: int, report: Callable[[str], None]) -> None:
        """Keep graphs of the rounds that a worker runs most: every number of sequences, with no drafts and with `drafts`.
        Other sizes are captured when they first come. Does nothing where there are no graphs."""
        if self._whole is not None:
            with torch.no_grad():
                self._whole.prepare(drafts, report)

    @property
    def runs_whole(self) -> bool:
        """Whether rounds can be left to the device whole: drafts, verify, picks."""
        return self._whole is not None

    @memory_faults()
    @torch.no_grad()
    def whole(self, rows: Sequence[WholeRow], *, more: bool = False) -> list[WholeResult]:
        """Run one round over distinct slots on a card, for streams whose rows a card may pick (`device_pickable`).

        As `verify`, and `accept` must follow for every slot; the head's drafts and all picks are made in the same launch.
        `more` = the caller means to ask for the next round of the same sequences, which may then start already; `land`
        must follow before one of the slots is given away.
        """
        self._bind()
        if self._whole is None:
            raise EngineFault("whole rounds run on a card")
        self._check_verify(rows)
        results = self._whole.run(rows, more=more)
        self.uncaptured = self._whole.uncaptured
        for row, result in zip(rows, results, strict=True):
            self._ring.wrote(row.slot, row.start + row.columns)
            if row.tap and self.block is not None and result.taps is not None:
                self.block.seen(row.slot, row.start, result.taps)
        return results

    def land(self, but: Collection[int] = ()) -> None:
        """No round that was started ahead is on its way any more, but for one whose slots are all among `but`. Idempotent."""
        if self._whole is not None:
            self._whole.land(but)

    def _make_way(self, slots: Collection[int]) -> None:
        if self._whole is not None:
            self._whole.make_way(slots)

    def accept(self, slot: int, rows: int) -> None:
        """Commit the first `rows` (0..T) columns of the slot's last verify. Exactly once between two verifies."""
        self._states.accept(slot, rows)
        if self.block is not None:
            with torch.no_grad():
                self.block.accepted(slot, rows)

    @torch.no_grad()
    def flush(self, slot: int) -> None:
        """Fold the accepted rows into the slot's state now, so that snapshots may be taken. Idempotent."""
        self._bind()
        self._make_way([slot])
        pending = self._states.fold(slot)
        if pending:
            plan = self._launches.fold(slot, pending)
            for state, store in zip(self._states.state, self._states.store, strict=True):
                gated_delta.fold(state, store, plan, self._shape, self._scale)
            self._states.flushed(slot)

    @memory_faults()
    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Logits:
        """[R, H] final-normed hidden (trunk or draft) -> [R, V] float32 logits."""
        self._bind()
        where = self._kv.k
        rows = self._model.logits(hidden.to(where.device, where.dtype).contiguous())
        return CardLogits(rows) if self._states.placement.on_card else rows

    @memory_faults()
    @torch.no_grad()
    def draft(self, rows: Sequence[DraftRows]) -> list[Tensor]:
        """Run MTP rows and write their draft KV; returns y [n, H] after `mtp.norm` a sequence.

        `logits(y)` of row p proposes the token at p + 1. Raises `EngineFault` when the model has no MTP head.
        """
        self._bind()
        if self._model.mtp is None:
            raise EngineFault("this model has no MTP head to draft with")
        if not rows:
            return []
        spans = [Span(row.start, len(row.tokens), row.block_table) for row in rows]
        for row, span in zip(rows, spans, strict=True):
            self._check_span(span, row.tokens, self._config.max_context)
            if tuple(row.hiddens.shape) != (span.count, self.dims.hidden):
                raise EngineFault(f"draft rows: hiddens {tuple(row.hiddens.shape)} for {span.count} tokens")
        hidden, columns = self._launches.draft(rows, spans)
        return _per_sequence(hidden, spans, columns)

    @memory_faults()
    @torch.no_grad()
    def propose(self, asks: Sequence[BlockAsk]) -> list[Proposal]:
        """One pass of the block drafter over all that ask; nothing for those whose window it does not have. Raises
        `EngineFault` without a drafter."""
        self._bind()
        if self.block is None:
            raise EngineFault("no block drafter is loaded")
        whole = [ask for ask in asks if self.block.covers(ask.slot, ask.start)]
        made = iter(self.block.propose(whole) if whole else ())
        return [next(made) if ask in whole else NoRows() for ask in asks]

    def _whole_rounds(self) -> WholeRounds | None:
        if not self._states.placement.on_card:
            return None
        blocks = -(-min(self._config.max_context, self.dims.max_positions) // ROWS)
        return WholeRounds(
            self._model,
            self._kv,
            self._states,
            self._config,
            blocks,
            lambda row: self.draft([row]),
            ring=self._ring,
            block=self.block,
        )

    def _bind(self) -> None:
        """OpenMP keeps its thread count per calling thread: set it in whichever thread owns the engine."""
        thread = threading.get_ident()
        if thread != self._thread:
            torch.set_num_threads(self._config.threads)
            self._thread = thread

    def _prefill(self, chunk: PrefillChunk) -> Tensor:
        span = Span(chunk.start, len(chunk.tokens), chunk.block_table)
        self._check_span(span, chunk.tokens, self._config.prefill_chunk)
        if chunk.start % BLOCK_ROWS:
            raise EngineFault(f"prefill from row {chunk.start}: not on the grid of {BLOCK_ROWS}")
        if self._states.settled(chunk.slot) != chunk.start:
            raise EngineFault(
                f"prefill from row {chunk.start}: slot {chunk.slot} is valid at {self._states.position(chunk.slot)}"
            )
        step, ids = self._launches.prefill(chunk, span)
        embedded = self._model.embed(ids)
        taps = Taps(self._taps) if self._taps else None
        hidden = self._model.trunk(embedded.clone(), step, taps)
        if self._model.mtp is not None:
            first = chunk.previous_hidden.view(1, -1).to(hidden.device, hidden.dtype)
            self._model.mtp(embedded, torch.cat([first, hidden[:-1]]), step.attention)
        self._states.advanced(chunk.slot, span.count)
        self._ring.wrote(chunk.slot, span.start + span.count)
        if self.block is not None and taps is not None:
            self.block.primed(chunk.slot, span.start, taps.rows()[: span.count], defer=chunk.defer)
        return hidden[: span.count]

    def _check_verify(self, rows: Sequence[VerifyRows | WholeRow]) -> None:
        if len({row.slot for row in rows}) != len(rows) or len(rows) > self._config.max_batch:
            raise EngineFault(
                f"verify of {len(rows)} sequences: slots must differ, at most {self._config.max_batch}"
            )
        for row in rows:
            tokens = row.tokens
            self._check_span(Span(row.start, len(tokens), row.block_table), tokens, self._states.max_verify)
            valid = self._states.position(row.slot) + self._states.fold(row.slot)
            if valid != row.start:
                raise EngineFault(f"verify from row {row.start}: slot {row.slot} is valid at {valid}")

    def _check_span(self, span: Span, tokens: Sequence[int], most: int) -> None:
        end = span.start + span.count
        if not 1 <= span.count <= most:
            raise EngineFault(f"rows {span.start}..{end}: 1 to {most} are possible in one call")
        if span.start < 0 or end > min(self._config.max_context, self.dims.max_positions):
            raise EngineFault(
                f"rows {span.start}..{end} are outside the context of {self._config.max_context}, or of the "
                f"{self.dims.max_positions} rows that max_position_embeddings allows"
            )
        if end > len(span.block_table) * ROWS:
            raise EngineFault(
                f"rows {span.start}..{end}: the block table holds {len(span.block_table)} blocks"
            )
        if min(tokens) < 0 or max(tokens) >= self.dims.vocab:
            raise EngineFault(f"a token id is outside the vocabulary of {self.dims.vocab}")


def _per_sequence(rows: Tensor, spans: Sequence[Span], columns: int) -> list[Tensor]:
    """[sequences * columns, H], perhaps with padded sequences behind -> the real rows of each sequence."""
    shaped = rows[: len(spans) * columns].view(len(spans), columns, -1)
    return [shaped[number, : span.count] for number, span in enumerate(spans)]
