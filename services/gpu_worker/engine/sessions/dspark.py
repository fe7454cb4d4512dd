"""DsparkSpecSession: a session with a block drafter, which commits and emits the same rows in every round.

    round: emit the decided token, verify it with the drafts, commit and emit the m that stand; the token after them is
           decided and *not* emitted: at every boundary of a round the rows are prompt + emitted (R-D1)

So nothing is ever pending between rounds, and a hand-off needs no flush (R-D6). Names and invariants are R-D1 to R-D6.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.drafters.block import BlockDrafter
from services.gpu_worker.engine.events import TokenLogprob
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sampling import Row
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.block_context import DraftContext
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.outcome import SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters
from shared.errors import EngineFault


class DsparkSpecSession(SpecSession):
    """See the module."""

    def __init__(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        shape: SessionShape,
        *,
        context: DraftContext,
        last_hidden: Tensor | None = None,
        capture_disabled: bool = False,
        counters: SessionCounters | None = None,
    ) -> None:
        """Raises EngineFault when the drafter lacks rows of what the sequence begins with (R-D2)."""
        if not context.covers(sequence.ssm_slot_idx(), sequence.seq_len):
            raise EngineFault(
                f"a draft tail of {context.dims.tail_rows} rows before {sequence.seq_len} is needed, fewer are there"
            )
        super().__init__(
            request,
            sequence,
            shape,
            last_hidden=last_hidden,
            capture_disabled=capture_disabled,
            counters=counters,
            drafter=BlockDrafter(sequence.ssm_slot_idx()),
        )
        self._context = context

    # -- what the requirements name -----------------------------------------------------------------------------

    @property
    def cache(self) -> SequenceState:
        """The sequence: its rows are prompt + emitted after each round (R-D1)."""
        return self.sequence

    @property
    def pos(self) -> int:
        """Rows in the cache."""
        return self.committed_len

    @property
    def rounds(self) -> int:
        """Verify passes so far; a burst's are the difference."""
        return self.telemetry().rounds

    @property
    def draft_kv(self) -> tuple[Tensor, Tensor]:
        """(keys, values) of the drafter's rings, of all slots, read-only."""
        return self._context.ring.k, self._context.ring.v

    @property
    def draft_tail_rows(self) -> int:
        """Rows with which a restored session drafts as a primed one: the window and a block (R-D2)."""
        return self._context.dims.tail_rows

    @property
    def finished(self) -> bool:
        """Whether it is over; it emits nothing more (R-D4)."""
        return self.ending is not None

    def take_prefix_capture(self) -> list[Capture] | None:
        """What the prime kept, once; null from then on (R-D5). Who publishes it is the worker's affair."""
        return self.drain_captures() or None

    @property
    def at_rest(self) -> bool:
        return self.has_pending or self.next_pred is not None

    # -- rounds -------------------------------------------------------------------------------------------------

    def settle(self, drafts: Sequence[int], logits: Sequence[Row], hidden: Tensor) -> int:
        """See `Session.settle`; the last pick is held back, so that what is committed is what was emitted."""
        start, anchor = self.committed_len, self.pending_tok
        replayed = self.completion.replaying
        assert anchor is not None
        stood: list[int] = []
        held: tuple[int, TokenLogprob | None] | None = None
        for column, row in enumerate(logits):
            token = self.completion.decide(self.picker.pick(row, start + column + 1))
            if column == len(drafts) or token != drafts[column]:
                held = token, self._logprob(row, token)
                break
            stood.append(token)
            if not self.take(token, self._logprob(row, token)):
                break
        rows = [anchor, *(stood[:-1] if self.ending is not None and self.ending.silent else stood)]
        self.sequence.commit(rows, draft_rows=self.writes_draft_rows)
        self.last_hidden = hidden[len(rows) - 1]
        if not replayed:
            self.counters.round(len(drafts), len(stood))
        self.judge(len(drafts), len(stood), replayed=replayed)
        self.pending_tok = None
        if held is not None:
            self.next_pred, self.next_logprob = held
        return len(rows)
