"""Glm5SpecSession: a session with one live anchor, over the trunk's own MTP head or over a block drafter.

    committed ──┐ one live anchor: emitted, not committed, row 0 of the next verify (R-G1)
    prime ──captures wait──> round 1: the drafter takes the prompt in ──> captures have their draft tail, and are told

The native head writes its plane while the prompt is primed, so its captures wait for nothing. A block drafter takes the
prompt's rows in when the first round asks it: a capture is ready once the drafter covers its boundary (R-G3), and one whose
session ends before that has no draft tail, which is never stored as an empty one (R-G4). Names and invariants are R-G1 to
R-G6. Near the end of the context the drafter goes and the stream comes to the same end as ever (C1.5).
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.drafters.block import BlockDrafter
from services.gpu_worker.engine.drafters.mtp import MtpDrafter
from services.gpu_worker.engine.drafters.propose import AnyDrafter
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.block_context import DraftContext
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.outcome import SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters

ANCHOR_GUARD: Final = 2
"""Rows kept clear of the context's end beyond the committed rows and K drafts (R-G2)."""


class Glm5SpecSession(SpecSession):
    """See the module."""

    def __init__(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        shape: SessionShape,
        *,
        context: DraftContext | None = None,
        last_hidden: Tensor | None = None,
        capture_disabled: bool = False,
        counters: SessionCounters | None = None,
    ) -> None:
        """`context` = what the block drafter keeps; null = the native arm."""
        drafter: AnyDrafter = MtpDrafter(sequence.proposer_state)
        if context is not None:
            drafter = BlockDrafter(sequence.ssm_slot_idx())
        super().__init__(
            request,
            sequence,
            shape,
            last_hidden=last_hidden,
            capture_disabled=capture_disabled,
            counters=counters,
            drafter=drafter,
        )
        self._context = context
        self._taken_in = context is None

    # -- what the requirements name -----------------------------------------------------------------------------

    @property
    def pos(self) -> int:
        """Rows in the cache: the committed ones, without the live anchor (R-G1)."""
        return self.committed_len

    @property
    def rounds(self) -> int:
        """Verify passes so far."""
        return self.telemetry().rounds

    @property
    def finished(self) -> bool:
        """Whether it is over; it emits nothing more (R-G2)."""
        return self.ending is not None

    @property
    def prefix_capture_ready(self) -> bool:
        """Whether there is a capture, and the drafter covers its boundary (R-G3)."""
        return bool(self.boundary_captures) and self._taken_in

    def take_prefix_capture(self) -> list[Capture] | None:
        """What the prime kept, once it is ready; asking before that takes nothing."""
        return self.drain_captures() or None

    def export_draft_tail(self, upto: int) -> Tensor | None:
        """[2, window + block, layers, KV heads, head], keys first: the drafter's rows before `upto`. Null on the native
        arm, and where the window is not covered (R-G4)."""
        if self._context is None:
            return None
        return self._context.tail(self.sequence.ssm_slot_idx(), upto)

    @property
    def demote_eligible(self) -> bool:
        """Whether plain decode may go on with the sequence: not while a journal is replayed, nor with rows that the stream
        does not have. A sampled stream may (R-S17), since its randomness is a function of the position (R-G6)."""
        return not (self.finished or self.tainted or self.completion.replaying or self.demoted)

    # -- the drafter takes the prompt in later ------------------------------------------------------------------

    @property
    def defers(self) -> bool:
        return not self._taken_in

    def drain_captures(self) -> list[Capture]:
        return super().drain_captures() if self._taken_in else []

    def leftover_captures(self) -> list[Capture]:
        if self.finished:
            self._take_in()
        self._taken_in = True
        return super().leftover_captures()

    def capture_here(self, cache: CacheManager) -> None:
        super().capture_here(cache)
        self._take_in()

    def draft_job(self) -> tuple[AnyDrafter, DraftJob] | None:
        self._take_in()
        return super().draft_job()

    def _take_in(self) -> None:
        """The drafter reads the prompt up to each capture, whose snapshot gets the tail that it lacks."""
        if self._taken_in or self._context is None:
            return
        self._taken_in = True
        slot = self.sequence.ssm_slot_idx()
        for capture in self.boundary_captures:
            self._context.complete(slot, capture.state.snapshot, capture.entry.position)
        self._context.settle([slot])

    @property
    def _near_the_end(self) -> bool:
        return self.committed_len + self.request.speculation_k + ANCHOR_GUARD > self.cache_max_ctx
