"""Opens sessions: which kind a request gets, with which drafter, and what finished streams leave for later ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from torch import Tensor

from services.gpu_worker.engine.config import EngineConfig, ModelDims
from services.gpu_worker.engine.drafters.block import BlockDrafter
from services.gpu_worker.engine.drafters.medley import Expected
from services.gpu_worker.engine.drafters.mtp import MtpDrafter
from services.gpu_worker.engine.drafters.ngram import NamespaceIndex, NgramDrafter
from services.gpu_worker.engine.drafters.propose import AnyDrafter
from services.gpu_worker.engine.events import DrafterOffReason
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import DrafterKind, GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.auto import AutoSpecSession
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.block_context import DraftContext, block_fits, block_misfit
from services.gpu_worker.engine.sessions.dspark import DsparkSpecSession
from services.gpu_worker.engine.sessions.glm5 import Glm5SpecSession
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.outcome import SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters


class _Life(TypedDict):
    """What every kind of session is told of what was before it; see `SessionFactory.open`."""

    last_hidden: Tensor | None
    capture_disabled: bool
    counters: SessionCounters | None


class SessionFactory:
    """One an engine."""

    def __init__(
        self,
        dims: ModelDims,
        config: EngineConfig,
        limits: EngineLimits,
        block: DraftContext | None = None,
        *,
        steady: bool = False,
    ) -> None:
        """`block` = what a block drafter keeps; null = there is none. `steady` = a stream with several drafters changes
        between them at the edges of bursts alone."""
        self.shape = SessionShape(
            vocab=dims.vocab,
            hidden=dims.hidden,
            max_verify=config.max_verify,
            cache_max_ctx=min(config.max_context, dims.max_positions),
            draft_cost=limits.draft_cost,
            ngram_cost=limits.ngram_cost,
            block_cost=limits.block_cost,
            block_width=limits.block_width,
            floor=limits.floor,
            floor_rounds=limits.floor_rounds,
        )
        self._block = block
        self._steady = steady
        self._live_anchor = dims.latent is not None
        self._said = NamespaceIndex()
        has: dict[DrafterKind, bool] = {"block": block is not None, "mtp": dims.has_mtp, "ngram": True}
        self.kinds: tuple[DrafterKind, ...] = tuple(kind for kind, there in has.items() if there)
        """The drafters that there are."""

    def drafts(self, request: GenerateRequest) -> bool:
        """Whether the request asks for a drafter that this model can have."""
        return request.speculation_k > 0 and (request.drafter == "auto" or request.drafter in self.kinds)

    def lacks(self, request: GenerateRequest) -> bool:
        """Whether the request asks for a drafter that is not here. It decodes plainly: a drafter is worth time, never a
        refusal, and the next attempt may find a worker that has it."""
        return request.speculation_k > 0 and request.drafter not in ("auto", "none", *self.kinds)

    def fitting(self, request: GenerateRequest, sequence: SequenceState) -> list[DrafterKind]:
        """The drafters that can serve the request from the rows that its sequence begins with: plain decode writes no
        draft rows, and a drafter that reads them would guess from nothing."""
        return [kind for kind in self.kinds if self._fits(kind, request, sequence)]

    def _fits(self, kind: DrafterKind, request: GenerateRequest, sequence: SequenceState) -> bool:
        if kind == "block":
            return self._block is not None and block_fits(request, sequence, self.shape, self._block)
        return kind == "ngram" or sequence.draft_valid_tokens == sequence.seq_len

    def misfit(self, request: GenerateRequest) -> DrafterOffReason:
        """Why the drafter that the request asks for, which is here, cannot serve it: its length, or the rows that its
        sequence begins with."""
        own = (
            block_misfit(request, self.shape, self._block)
            if request.drafter == "block" and self._block
            else None
        )
        return own or DrafterOffReason.DRAFT_ROWS

    def open(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        *,
        drafter: DrafterKind,
        last_hidden: Tensor | None,
        counters: SessionCounters | None = None,
        capture_disabled: bool = False,
        expected: Mapping[DrafterKind, Expected] | None = None,
    ) -> Session:
        """A session at the start of its prime. `drafter` = one that fits, or none; `counters` = of an earlier life, whose
        stream this one replays; `capture_disabled` = that life ended for lack of memory (R-S8). `expected` of all that fit:
        the session may change between them; null = it may not."""
        life: _Life = {
            "last_hidden": last_hidden,
            "capture_disabled": capture_disabled,
            "counters": counters,
        }
        if expected is not None and drafter in expected and len(expected) > 1:
            drafters = self._auto(request, sequence, expected)
            return AutoSpecSession(
                request,
                sequence,
                self.shape,
                drafters=drafters,
                expected=expected,
                first=drafter,
                steady=self._steady,
                **life,
            )
        if self._live_anchor and drafter in ("mtp", "block"):
            context = self._block if drafter == "block" else None
            return Glm5SpecSession(request, sequence, self.shape, context=context, **life)
        if drafter == "block" and self._block is not None:
            return DsparkSpecSession(request, sequence, self.shape, context=self._block, **life)
        if drafter == "none":
            return Session(request, sequence, self.shape, **life)
        own = self._ngram(request) if drafter == "ngram" else MtpDrafter(sequence.proposer_state)
        return SpecSession(request, sequence, self.shape, drafter=own, **life)

    def finished(self, request: GenerateRequest, completion: list[int]) -> None:
        """Let later n-gram drafters of the namespace know what was said, if the request may leave traces."""
        if request.drafter in ("ngram", "auto") and request.use_cache and completion:
            self._said.learn(request.root, [*request.tokens, *completion], len(request.tokens))

    def _auto(
        self, request: GenerateRequest, sequence: SequenceState, expected: Mapping[DrafterKind, Expected]
    ) -> dict[DrafterKind, AnyDrafter]:
        """A drafter of each kind expected."""
        made: dict[DrafterKind, AnyDrafter] = {}
        for kind in expected:
            match kind:
                case "block":
                    made[kind] = BlockDrafter(sequence.ssm_slot_idx())
                case "mtp":
                    made[kind] = MtpDrafter(sequence.proposer_state)
                case _:
                    made[kind] = self._ngram(request)
        return made

    def _ngram(self, request: GenerateRequest) -> NgramDrafter:
        return NgramDrafter(request.tokens, request.root, self._said)
