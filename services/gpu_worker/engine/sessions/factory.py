"""Opens sessions: which kind a request gets, with which drafter, and what finished streams leave for later ones."""

from __future__ import annotations

from torch import Tensor

from services.gpu_worker.engine.config import EngineConfig, ModelDims
from services.gpu_worker.engine.drafters.mtp import MtpDrafter
from services.gpu_worker.engine.drafters.ngram import NamespaceIndex, NgramDrafter
from services.gpu_worker.engine.drafters.propose import AnyDrafter
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import ProposerState, SequenceState
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.dspark import DraftContext, DsparkSpecSession, block_fits
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.outcome import SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters


class SessionFactory:
    """One an engine."""

    def __init__(
        self,
        dims: ModelDims,
        config: EngineConfig,
        limits: EngineLimits,
        block: DraftContext | None = None,
    ) -> None:
        """`block` = what a block drafter keeps; null = there is none."""
        self.shape = SessionShape(
            vocab=dims.vocab,
            hidden=dims.hidden,
            max_verify=config.max_verify,
            cache_max_ctx=min(config.max_context, dims.max_positions),
            draft_cost=limits.draft_cost,
            ngram_cost=limits.ngram_cost,
            block_cost=limits.block_cost,
            floor=limits.floor,
            floor_rounds=limits.floor_rounds,
        )
        self._has_mtp = dims.has_mtp
        self._block = block
        self._said = NamespaceIndex()

    def drafts(self, request: GenerateRequest) -> bool:
        """Whether the request asks for a drafter that this model can have."""
        if request.speculation_k < 1 or request.drafter == "none":
            return False
        match request.drafter:
            case "ngram":
                return True
            case "block":
                return self._block is not None
        return self._has_mtp

    def _has_draft_rows(self, request: GenerateRequest, sequence: SequenceState) -> bool:
        """Whether the rows that the sequence begins with have what the drafter reads: plain decode writes no draft
        rows, and a head that reads them would guess from nothing."""
        if request.drafter == "block":
            return self._block is not None and block_fits(request, sequence, self.shape, self._block)
        return request.drafter == "ngram" or sequence.draft_valid_tokens == sequence.seq_len

    def open(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        *,
        speculate: bool,
        last_hidden: Tensor | None,
        counters: SessionCounters | None = None,
        capture_disabled: bool = False,
    ) -> Session:
        """A session at the start of its prime. `counters` = of an earlier life, whose stream this one replays;
        `capture_disabled` = that life ended for lack of memory (R-S8)."""
        if not (speculate and self.drafts(request) and self._has_draft_rows(request, sequence)):
            return Session(
                request,
                sequence,
                self.shape,
                last_hidden=last_hidden,
                capture_disabled=capture_disabled,
                counters=counters,
            )
        if request.drafter == "block" and self._block is not None:
            return DsparkSpecSession(
                request,
                sequence,
                self.shape,
                context=self._block,
                last_hidden=last_hidden,
                capture_disabled=capture_disabled,
                counters=counters,
            )
        return SpecSession(
            request,
            sequence,
            self.shape,
            last_hidden=last_hidden,
            capture_disabled=capture_disabled,
            counters=counters,
            drafter=self._drafter(request, sequence.proposer_state),
        )

    def finished(self, request: GenerateRequest, completion: list[int]) -> None:
        """Let later n-gram drafters of the namespace know what was said, if the request may leave traces."""
        if request.drafter == "ngram" and request.use_cache and completion:
            self._said.learn(request.root, [*request.tokens, *completion], len(request.tokens))

    def _drafter(self, request: GenerateRequest, known: ProposerState | None) -> AnyDrafter:
        if request.drafter == "ngram":
            return NgramDrafter(request.tokens, request.root, self._said)
        return MtpDrafter(known)
