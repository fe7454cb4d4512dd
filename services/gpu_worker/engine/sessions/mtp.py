"""SpecSession: a session with a drafter. The MTP head is the usual one (a chain of K one-token drafts a round); the n-gram
drafter takes the same path with drafts of its own, on any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.drafters.block import BlockDrafter
from services.gpu_worker.engine.drafters.gate import DraftGate
from services.gpu_worker.engine.drafters.ladder import Ladder
from services.gpu_worker.engine.drafters.mtp import MtpDrafter
from services.gpu_worker.engine.drafters.ngram import NgramDrafter
from services.gpu_worker.engine.drafters.propose import AnyDrafter
from services.gpu_worker.engine.events import DrafterOffReason
from services.gpu_worker.engine.requests import DrafterKind, GenerateRequest
from services.gpu_worker.engine.sequence import ProposerState, SequenceState
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.outcome import SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters

CONTEXT_GUARD: Final = 3
"""Rows kept clear of the context's end beyond the committed rows and K drafts (R-S9)."""


class SpecSession(Session):
    """Names and invariants are R-S1 to R-S12 (most stand in the base, which plain decode shares)."""

    def __init__(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        shape: SessionShape,
        *,
        last_hidden: Tensor | None = None,
        capture_disabled: bool = False,
        counters: SessionCounters | None = None,
        drafter: AnyDrafter | None = None,
    ) -> None:
        """`drafter` = null: the MTP head."""
        super().__init__(
            request,
            sequence,
            shape,
            last_hidden=last_hidden,
            capture_disabled=capture_disabled,
            counters=counters,
        )
        self.drafter: AnyDrafter | None = drafter or MtpDrafter()
        self.kind: DrafterKind = _kind(self.drafter)
        """Of the drafter that it has, or had."""
        self.off_reason: DrafterOffReason | None = None
        """Why the session itself turned its drafter off."""
        self._gate = self._new_gate()

    def _new_gate(self) -> DraftGate:
        most, floor, rounds = self.request.speculation_k, self.shape.floor, self.shape.floor_rounds
        if self.kind == "block" and self.shape.block_width == "ladder":
            return Ladder(most=most, floor=floor, floor_rounds=rounds)
        return DraftGate(
            most=most,
            cost=self.shape.draft_cost if self.kind == "mtp" else self.shape.ngram_cost,
            fixed=self.shape.block_cost if self.kind == "block" else 0.0,
            floor=floor,
            floor_rounds=rounds,
        )

    @property
    def cache_ref(self) -> SequenceState:
        """The sequence whose rows below a boundary never change while the session lives (R-S10)."""
        return self.sequence

    def draft_plane_ref(self, kv: KVPool) -> tuple[Tensor, Tensor, int] | None:
        """(k, v, bytes a row) of the draft plane, read-only; null without a head that writes it (R-S11)."""
        if not isinstance(self.drafter, MtpDrafter):
            return None
        return kv.k[-1], kv.v[-1], kv.plane_bytes

    def resume(self, cache: CacheManager) -> None:
        """See `Session.resume`; an index learns what was said, a head's drafter was made with what it knew."""
        super().resume(cache)
        if isinstance(self.drafter, NgramDrafter):
            said = self.request.emitted[: self.completion_tokens]
            self.drafter.observe(len(self.request.tokens), said, self.last_hidden[None])

    @property
    def writes_draft_rows(self) -> bool:
        return isinstance(self.drafter, MtpDrafter)

    @property
    def taps(self) -> bool:
        return isinstance(self.drafter, BlockDrafter)

    def proposer_state(self) -> ProposerState | None:
        whole = self.sequence.draft_valid_tokens == self.committed_len
        return self.drafter.state() if isinstance(self.drafter, MtpDrafter) and whole else None

    # -- demotion -----------------------------------------------------------------------------------------------

    @property
    def demoted(self) -> bool:
        """Whether the session decodes plainly from here on."""
        return self.drafter is None

    @property
    def demote_ready(self) -> bool:
        """Whether the sequence can be handed over: nothing pending, the next token decided, no rows that the stream
        does not have (R-S15)."""
        return not self.has_pending and self.next_pred is not None and not self.tainted

    def into_demoted(self) -> tuple[SequenceState, int] | None:
        """Give the sequence and the decided token away and drop the drafter; null, and nothing changed, when the
        session is not ready. The session is over afterwards (R-S17)."""
        if not self.demote_ready or self.next_pred is None:
            return None
        token, self.next_pred = self.next_pred, None
        self.drafter = None
        return self.sequence, token

    def park(self) -> None:
        """See `Session.park`; the drafter goes too."""
        self.drafter = None
        super().park()

    # -- rounds -------------------------------------------------------------------------------------------------

    def draft_job(self) -> tuple[AnyDrafter, DraftJob] | None:
        """What to draft for the next round; null once demoted.

        Near the end of the context the session demotes: k is 0 from there on and the drafter goes (R-S9).
        """
        if self._near_the_end:
            self._turn_off(DrafterOffReason.CONTEXT)
        if self.drafter is None:
            return None
        replaying = self.replay_drafts() is not None
        return self.drafter, DraftJob(
            k=0 if replaying else min(self._gate.width(), self.draft_limit()),
            picker=self.picker,
            block_table=self.sequence.block_table,
            rungs=min(self._gate.rungs, self.shape.max_verify),
        )

    @property
    def _near_the_end(self) -> bool:
        return self.committed_len + self.request.speculation_k + CONTEXT_GUARD >= self.cache_max_ctx

    def side_jobs(self) -> list[tuple[AnyDrafter, DraftJob]]:
        """Drafters that do not propose in this round and are to keep up all the same."""
        return []

    def judge(self, drafted: int, accepted: int, *, replayed: bool) -> None:
        """Let the gate learn what the drafter's own proposals were worth; under the floor the drafter goes (FR-22)."""
        if not replayed:
            self._gate.observe(drafted, accepted)
            if self._gate.useless:
                self._turn_off(DrafterOffReason.ACCEPTANCE)

    def know(self, tokens: Sequence[int], hiddens: Tensor) -> None:
        """Hand certain tokens to the drafter."""
        if self.drafter is not None:
            self.drafter.observe(self.sctr - len(tokens), tokens, hiddens)

    def know_prompt(self, tokens: Sequence[int], hiddens: Tensor) -> None:
        """A head writes draft rows of what prefill does not; an index has the prompt already."""
        if isinstance(self.drafter, MtpDrafter):
            self.drafter.observe(self.committed_len - len(tokens), tokens, hiddens)

    def take_draft_rows(self) -> DraftRows | None:
        if isinstance(self.drafter, MtpDrafter) and self.drafter.backlog:
            return self.drafter.take(self.sequence.block_table)
        return None

    def _turn_off(self, reason: DrafterOffReason) -> None:
        if self.drafter is not None:
            self.drafter, self.off_reason = None, reason


def _kind(drafter: AnyDrafter | None) -> DrafterKind:
    match drafter:
        case MtpDrafter():
            return "mtp"
        case BlockDrafter():
            return "block"
        case NgramDrafter():
            return "ngram"
    return "none"
