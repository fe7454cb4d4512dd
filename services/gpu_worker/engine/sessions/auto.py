"""AutoSpecSession: a speculative session that keeps several drafters ready and asks, each turn, the one that pays.

A turn is a round, or a burst where rounds follow one another without the host (`steady`). The head's plane and the block
drafter's rows are both kept up with what is committed, whoever drafted it, so that either can go on at any round. Its anchor
is the live one of `SpecSession`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.drafters.gate import Floor
from services.gpu_worker.engine.drafters.medley import Expected, Medley
from services.gpu_worker.engine.drafters.mtp import MtpDrafter
from services.gpu_worker.engine.drafters.ngram import NgramDrafter
from services.gpu_worker.engine.drafters.propose import AnyDrafter
from services.gpu_worker.engine.events import DrafterOffReason, Share
from services.gpu_worker.engine.requests import DrafterKind, GenerateRequest
from services.gpu_worker.engine.sequence import ProposerState, SequenceState
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.outcome import SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters

UPKEEP_ROWS: Final = 48
"""Rows of the head's plane that wait while others draft: a call with many costs little more than one with few."""


class AutoSpecSession(SpecSession):
    """Over two drafters at least."""

    def __init__(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        shape: SessionShape,
        *,
        drafters: Mapping[DrafterKind, AnyDrafter],
        expected: Mapping[DrafterKind, Expected],
        first: DrafterKind,
        steady: bool = False,
        last_hidden: Tensor | None = None,
        capture_disabled: bool = False,
        counters: SessionCounters | None = None,
    ) -> None:
        """`expected` of each drafter, in the same order; `first` = who begins; `steady` = a turn is a whole burst."""
        super().__init__(
            request,
            sequence,
            shape,
            last_hidden=last_hidden,
            capture_disabled=capture_disabled,
            counters=counters,
            drafter=drafters[first],
        )
        self._drafters = dict(drafters)
        self._medley = Medley(expected, most=request.speculation_k, first=first)
        self._steady, self._due = steady, True
        self._floor = Floor(shape.floor, shape.floor_rounds)
        self._shares: dict[DrafterKind, Share] = {}

    @property
    def rates(self) -> tuple[tuple[DrafterKind, float], ...]:
        """What each has been bringing, over plain decode."""
        return tuple((kind, self._medley.rates[kind]) for kind in self._drafters)

    def drain_shares(self) -> tuple[Share, ...]:
        """What each drafter had of the rounds since this was asked last."""
        shares, self._shares = self._shares, {}
        return tuple(shares.values())

    @property
    def _head(self) -> MtpDrafter | None:
        head = self._drafters.get("mtp")
        return head if isinstance(head, MtpDrafter) and not self.demoted else None

    # -- what is kept up ----------------------------------------------------------------------------------------

    @property
    def taps(self) -> bool:
        return "block" in self._drafters and not self.demoted

    @property
    def writes_draft_rows(self) -> bool:
        return self._head is not None

    def draft_plane_ref(self, kv: KVPool) -> tuple[Tensor, Tensor, int] | None:
        return (kv.k[-1], kv.v[-1], kv.plane_bytes) if self._head is not None else None

    def proposer_state(self) -> ProposerState | None:
        whole = self.sequence.draft_valid_tokens == self.committed_len
        return self._head.state() if self._head is not None and whole else None

    def resume(self, cache: CacheManager) -> None:
        super().resume(cache)
        index = self._drafters.get("ngram")
        if isinstance(index, NgramDrafter) and index is not self.drafter:
            said = self.request.emitted[: self.completion_tokens]
            index.observe(len(self.request.tokens), said, self.last_hidden[None])

    def know(self, tokens: Sequence[int], hiddens: Tensor) -> None:
        if not self.demoted:
            for drafter in self._drafters.values():
                drafter.observe(self.sctr - len(tokens), tokens, hiddens)

    def know_prompt(self, tokens: Sequence[int], hiddens: Tensor) -> None:
        if self._head is not None:
            self._head.observe(self.committed_len - len(tokens), tokens, hiddens)

    def take_draft_rows(self) -> DraftRows | None:
        if self._head is not None and self._head.backlog:
            return self._head.take(self.sequence.block_table)
        return None

    # -- rounds -------------------------------------------------------------------------------------------------

    @property
    def begins_alike(self) -> bool:
        """Not where a burst is a turn, for which a drafter is chosen."""
        return self.demoted or not self._steady

    def begin_burst(self) -> None:
        self._due = True

    def draft_job(self) -> tuple[AnyDrafter, DraftJob] | None:
        job = super().draft_job()
        if job is None or self.completion.replaying:
            return job
        if self._due or not self._steady:
            self._due, self.drafter = False, self._drafters[self._medley.next()]
        limit = self.draft_limit()
        index = self._drafters.get("ngram")
        if isinstance(index, NgramDrafter) and not self._steady:
            ready = len(index.propose(min(self.request.speculation_k, limit)))
            if ready and self._medley.offer("ngram", ready):
                self.drafter = index
                return index, DraftJob(k=ready, picker=self.picker, block_table=self.sequence.block_table)
        assert self.drafter is not None  # by the job that there is
        k = min(self._medley.width(), limit)
        return self.drafter, DraftJob(k=k, picker=self.picker, block_table=self.sequence.block_table)

    def side_jobs(self) -> list[tuple[AnyDrafter, DraftJob]]:
        """The head keeps up while others draft; its rows wait until they are many, or its turn comes."""
        if self._head is None or self._head is self.drafter or self._head.backlog < UPKEEP_ROWS:
            return []
        return [(self._head, DraftJob(k=0, picker=self.picker, block_table=self.sequence.block_table))]

    def judge(self, drafted: int, accepted: int, *, replayed: bool) -> None:
        if replayed:
            return
        turn = self._medley.asked
        _, rounds, before, stood = self._shares.get(turn, Share(turn, 0, 0, 0))
        self._shares[turn] = Share(turn, rounds + 1, before + drafted, stood + accepted)
        self._floor.observe(accepted)
        self._medley.observe(drafted, accepted)
        self.kind = self._medley.preferred
        if self._floor.missed:
            self._turn_off(DrafterOffReason.ACCEPTANCE)
