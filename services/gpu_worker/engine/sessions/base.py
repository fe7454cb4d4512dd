"""A session: one sequence on its way from prompt to end, advanced in rounds.

State is (committed, anchor, anchor emitted or not). `committed` are the rows in the cache; the anchor is the newest
token and not among them:

    prime done ──> next_pred set          decided, not emitted, not in the cache
    burst      ──> pending_tok set        emitted, not in the cache: column 0 of the next verify

`cache.pos == len(committed)` at every burst boundary (R-S1), and exactly one of the two is set until the end. A round
costs one verify: the pending token rides as its column 0, so a burst that goes on costs no pass of its own.

Knows tokens, rows and the rules of one request. Does not know the queue, other sessions or who runs the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.cache.manager import CacheManager, CaptureFailed
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest, SpecTelemetry, TokenLogprob
from services.gpu_worker.engine.sampling import Row, TokenPicker, token_logprob
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.completion import Completion
from services.gpu_worker.engine.sessions.graphs import GraphFallback
from services.gpu_worker.engine.sessions.outcome import Emission, Ending, SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters
from shared.errors import EngineFault


class Session:
    """Plain decode; speculative sessions add a drafter (`SpecSession`)."""

    def __init__(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        shape: SessionShape,
        *,
        last_hidden: Tensor | None = None,
        capture_disabled: bool = False,
        counters: SessionCounters | None = None,
    ) -> None:
        """`last_hidden` [H] belongs to the row before a restored prefix; null = cold. `capture_disabled` = prime
        without captures, and launch without graphs (R-S8). `counters` of an earlier life of the stream go on."""
        self.request = request
        self.sequence = sequence
        self.shape = shape
        self.cache_max_ctx = shape.cache_max_ctx
        self.capture_disabled = capture_disabled
        self.graphs = GraphFallback(premarked=capture_disabled)
        self.completion = Completion(request, shape.vocab)
        self.next_pred: int | None = None
        self.next_logprob: TokenLogprob | None = None
        self.pending_tok: int | None = None
        self.last_hidden = last_hidden if last_hidden is not None else torch.zeros(shape.hidden)
        self.chunks = 0
        self.boundary_captures: list[Capture] = []
        self.counters = counters or SessionCounters()
        self._capture_at = _to_grid(request.capture_at)
        self._ckpt_at = _to_grid(request.ckpt_at)
        self._cuts: list[int] | None = None

    # -- what the requirements name -----------------------------------------------------------------------------

    @property
    def committed(self) -> list[int]:
        """Tokens in the cache, one a row."""
        return self.sequence.tokens

    @property
    def committed_len(self) -> int:
        return self.sequence.seq_len

    @property
    def has_pending(self) -> bool:
        return self.pending_tok is not None

    @property
    def sctr(self) -> int:
        """Next counter of the sampling stream: the position of the first token not decided yet (R-S3)."""
        return self.committed_len + (self.has_pending or self.next_pred is not None)

    @property
    def uctr(self) -> int:
        """Next counter of the drafter stream: the same, since drafters share the target's noise."""
        return self.sctr

    @property
    def capture_at(self) -> int | None:
        """Shared-prefix boundary for the next prime; one-shot, floored to the grid when set (R-S5)."""
        return self._capture_at

    @capture_at.setter
    def capture_at(self, position: int | None) -> None:
        self._capture_at = _to_grid(position)

    @property
    def ckpt_at(self) -> int | None:
        """Boundary of the turn's checkpoint; one-shot, null = prompt end (R-S7)."""
        return self._ckpt_at

    @ckpt_at.setter
    def ckpt_at(self, position: int | None) -> None:
        self._ckpt_at = _to_grid(position)

    @property
    def picker(self) -> TokenPicker:
        """The request's sampling rules and history."""
        return self.completion.picker

    @property
    def completion_tokens(self) -> int:
        """Tokens decided so far."""
        return self.completion.tokens

    @property
    def ending(self) -> Ending | None:
        """How the stream ended; null while it goes on."""
        return self.completion.ending

    def drain_captures(self) -> list[Capture]:
        """What the prime kept, ascending; answered once (R-S6)."""
        captures, self.boundary_captures = self.boundary_captures, []
        return captures

    def telemetry(self) -> SpecTelemetry:
        """Monotone counters; consumers subtract (R-S12)."""
        return self.counters.read()

    # -- prime --------------------------------------------------------------------------------------------------

    @property
    def primed(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.committed_len >= len(self.request.tokens)

    @property
    def prime_left(self) -> int:
        """Prompt rows to compute."""
        return len(self.request.tokens) - self.committed_len

    def next_chunk(self, budget: int, cache: CacheManager) -> PrefillChunk:
        """Prompt rows for one launch: at most `budget` (a multiple of 64), ending on a boundary where there is one."""
        start = self.committed_len
        if self._cuts is None:
            self._cuts = self._plan_cuts(cache)
        self.sequence.prompt_len = len(self.request.tokens)
        cut = next((position for position in self._cuts if position > start), len(self.request.tokens))
        stop = min(start + budget, cut, len(self.request.tokens))
        return PrefillChunk(
            slot=self.sequence.ssm_slot_idx(),
            start=start,
            tokens=self.request.tokens[start:stop],
            block_table=self.sequence.block_table,
            previous_hidden=self.last_hidden,
        )

    def prefilled(self, chunk: PrefillChunk, hidden: Tensor, cache: CacheManager) -> None:
        """Commit a chunk's rows (`hidden` [n, H]) and capture where it ended on a boundary."""
        self.sequence.commit(list(chunk.tokens))
        self.last_hidden = hidden[-1].clone()
        self.chunks += 1
        if self._cuts and self.committed_len in self._cuts:
            try:
                capture = cache.capture(self.request, self.sequence, self.committed_len, self.last_hidden)
            except CaptureFailed:
                self.counters.capture_failures += 1
            else:
                if capture is not None:
                    self.boundary_captures.append(capture)

    def end_prime(self, logits: Row) -> None:
        """Decide the first token from the last prompt row [V]; it waits as `next_pred`."""
        self.capture_at = self.ckpt_at = None
        try:
            self._decide_next(logits)
        except EngineFault as fault:
            self.fail(fault.code, fault.message)

    def _decide_next(self, logits: Row) -> None:
        token = self.picker.pick(logits, self.committed_len)
        self.next_pred = token
        self.next_logprob = self._logprob(logits, token)

    def _plan_cuts(self, cache: CacheManager) -> list[int]:
        if not self.request.use_cache or self.capture_disabled:
            return []
        prompt_end = len(self.request.tokens) // BLOCK_ROWS * BLOCK_ROWS
        ckpt = min(self.ckpt_at, prompt_end) if self.ckpt_at is not None else prompt_end
        return cache.boundaries(self.request, self.committed_len, self.capture_at, ckpt)

    # -- rounds -------------------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Emit the decided token, if one waits. True when the session can run a round."""
        if self.next_pred is not None and self.ending is None:
            token, self.next_pred = self.next_pred, None
            if self.completion.take(token, self.next_logprob):
                self.pending_tok = token
                self.know([token], self.last_hidden[None])
        return self.ending is None and self.has_pending

    def draft_limit(self) -> int:
        """Most drafts of the next round: no row of it lies past the public stream (C1.5) or the verify width."""
        return max(0, min(self.shape.max_verify, self.completion.budget_left) - 1)

    def replay_drafts(self) -> list[int] | None:
        """Journalled tokens to verify, null when there are none left."""
        return self.completion.journalled(self.draft_limit()) if self.completion.replaying else None

    def verify_rows(self, drafts: Sequence[int]) -> VerifyRows:
        """Anchor and drafts, as columns of one verify."""
        if self.pending_tok is None:
            raise EngineFault("a round needs a pending token")
        return VerifyRows(
            slot=self.sequence.ssm_slot_idx(),
            start=self.committed_len,
            tokens=(self.pending_tok, *drafts),
            block_table=self.sequence.block_table,
            eager=self.graphs.eager,
        )

    def settle(self, drafts: Sequence[int], logits: Sequence[Row], hidden: Tensor) -> int:
        """Walk the verified columns: accept drafts while they are what the target picks. Answers the rows to commit.

        Column i decides position P + i + 1. The walk ends at the first pick that differs, at the last column, or with
        the stream; the last pick becomes the pending token.
        """
        start, anchor = self.committed_len, self.pending_tok
        replayed = self.completion.replaying
        assert anchor is not None
        picks: list[int] = []
        going = True
        for column, row in enumerate(logits):
            token = self.picker.pick(row, start + column + 1)
            picks.append(token)
            going = self.completion.take(token, self._logprob(row, token))
            if not going or column == len(drafts) or token != drafts[column]:
                break
        accepted = len(picks) - 1
        self.sequence.commit([anchor, *picks[:-1]])
        self.last_hidden = hidden[accepted].clone()
        self.counters.round(len(drafts), accepted)
        self.judge(len(drafts), accepted, replayed=replayed)
        self.pending_tok = picks[-1] if going else None
        if going:
            self.know(picks, hidden[: accepted + 1])
        return accepted + 1

    def know(self, tokens: Sequence[int], hiddens: Tensor) -> None:
        """Tokens after the committed rows became certain; `hiddens` [n, H] of the rows before them. For drafters."""

    def judge(self, drafted: int, accepted: int, *, replayed: bool) -> None:
        """A round's outcome; `replayed` = the drafts came from the journal. For drafters that adapt."""

    # -- ends ---------------------------------------------------------------------------------------------------

    def fail(self, code: str, detail: str) -> None:
        """End with an error; nothing decided later is emitted."""
        self.completion.fail(code, detail)
        self.next_pred = self.pending_tok = None

    def end(self, ending: Ending) -> None:
        """End the stream; the first ending stands."""
        self.completion.end(ending)
        self.next_pred = self.pending_tok = None

    def drain(self) -> list[Emission]:
        """Tokens to deliver since the last call."""
        return self.completion.drain()

    def _logprob(self, row: Row, token: int) -> TokenLogprob | None:
        top = self.request.top_logprobs
        return None if top is None else token_logprob(row, token, top)


def _to_grid(position: int | None) -> int | None:
    return None if position is None else position // BLOCK_ROWS * BLOCK_ROWS
