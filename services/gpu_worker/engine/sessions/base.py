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

from services.gpu_worker.engine.batch import VerifyRows
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.events import SpecTelemetry, TokenLogprob
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sampling import Row, TokenPicker, token_logprob
from services.gpu_worker.engine.sequence import ProposerState, SequenceState
from services.gpu_worker.engine.sessions.completion import Completion
from services.gpu_worker.engine.sessions.graphs import GraphFallback
from services.gpu_worker.engine.sessions.outcome import Decline, Emission, Ending, SessionShape
from services.gpu_worker.engine.sessions.prompt import PromptSide
from services.gpu_worker.engine.sessions.telemetry import SessionCounters
from shared.errors import EngineFault


class Session(PromptSide):
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
        super().__init__(
            request,
            sequence,
            shape,
            last_hidden=last_hidden if last_hidden is not None else torch.zeros(shape.hidden),
            capture_disabled=capture_disabled,
            counters=counters or SessionCounters(),
        )
        self.cache_max_ctx = shape.cache_max_ctx
        self.graphs = GraphFallback(premarked=capture_disabled)
        self.completion = Completion(request, shape.vocab)
        self.next_pred: int | None = None
        self.next_logprob: TokenLogprob | None = None
        self.pending_tok: int | None = None
        self.overshoot = 0
        """Columns past the end of the stream that a round may take: a fault to prove R-S1 and R-S16 with, 0 else."""
        self.tainted = False
        """Whether rows are committed that the stream does not have."""

    # -- what the requirements name -----------------------------------------------------------------------------

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
    def picker(self) -> TokenPicker:
        """The request's sampling rules and history."""
        return self.completion.picker

    @property
    def picked_anywhere(self) -> bool:
        """Whether a token alone must come back from where the logits are: the rules need no history, and nobody asked
        for log probabilities. A function of the request, so that a stream has one path to its end."""
        return self.picker.pickable and self.request.top_logprobs is None

    @property
    def completion_tokens(self) -> int:
        """Tokens decided so far."""
        return self.completion.tokens

    @property
    def ending(self) -> Ending | None:
        """How the stream ended; null while it goes on."""
        return self.completion.ending

    def telemetry(self) -> SpecTelemetry:
        """Monotone counters; consumers subtract (R-S12)."""
        return self.counters.read()

    # -- prime --------------------------------------------------------------------------------------------------

    def end_prime(self, logits: Row) -> None:
        """Decide the first token from the last prompt row [V]; it waits as `next_pred`."""
        self.capture_at = self.ckpt_at = None
        if self.completion.over():
            return
        try:
            self.decide_next(logits)
        except EngineFault as fault:
            self.fail(fault.code, fault.message)

    def decide_next(self, logits: Row) -> None:
        """Pick the token after the committed rows from the last row [V]; it waits, not emitted."""
        token = self.completion.decide(self.picker.pick(logits, self.committed_len))
        self.next_pred = token
        self.next_logprob = self._logprob(logits, token)

    @property
    def at_rest(self) -> bool:
        """Whether its rows and the journal are all that a later session needs to go on from here."""
        return self.has_pending

    def resume(self, cache: CacheManager) -> None:
        """Go on in mid decode from rows that were kept of the same stream: the journal's token after them is pending,
        the rest of the journal is verified. A journal that ends with the rows leaves the next token to be decided from
        the last row again (`restored`). Raises EngineFault when the journal does not reach the rows."""
        said = self.committed_len - len(self.request.tokens)
        if not 0 <= said <= len(self.request.emitted):
            raise EngineFault(f"{said} completion rows, and a journal of {len(self.request.emitted)} tokens")
        if said == len(self.request.emitted):
            self.completion.resume(said)
            self.undecided = True
            return
        self.resume_prompt(cache)
        self.completion.resume(said + 1)
        self.pending_tok = self.request.emitted[said]

    def proposer_state(self) -> ProposerState | None:
        """What the drafter knows, to be kept with the rows; null without a head that writes the draft plane."""
        return None

    def go_on(self, other: Session, token: int, logprob: TokenLogprob | None) -> None:
        """Take over the stream of `other`, whose sequence this session has; `token` is decided and not emitted."""
        self.completion = other.completion
        self.boundary_captures = other.leftover_captures()
        self.chunks = other.chunks
        self._checkpoint = other._checkpoint
        self.next_pred, self.next_logprob = token, logprob

    def flushed(self, row: Row, hidden: Tensor) -> None:
        """A single-row pass committed the pending token: `row` [V] decides the next one, unless the turn is over; `hidden`
        [H] is the row's.

        Raises EngineFault when the row cannot be picked from.
        """
        if self.pending_tok is None:
            raise EngineFault("a flush needs a pending token")
        self.sequence.commit([self.pending_tok], draft_rows=self.writes_draft_rows)
        self.pending_tok = None
        self.last_hidden = hidden.clone()
        if self.ending is None:
            self.counters.round(0, 0)
            self.decide_next(row)

    def end_of_turn(self, token: int | None) -> None:
        """The stream is over and its rows are to be kept: `token`, delivered and without a row, is pending again, for
        `flush_pending` (R-S4)."""
        self.pending_tok = token
        if token is not None:
            self.know([token], self.last_hidden[None])

    # -- rounds -------------------------------------------------------------------------------------------------

    @property
    def begins_alike(self) -> bool:
        """Whether a burst begins with the round that would have followed the last one."""
        return True

    def begin_burst(self) -> None:
        """Rounds follow that the engine does not come between."""

    def open(self) -> bool:
        """Emit the decided token, if one waits. True when the session can run a round."""
        if self.next_pred is not None and self.ending is None:
            token, self.next_pred = self.next_pred, None
            if self.take(token, self.next_logprob):
                self.pending_tok = token
                self.know([token], self._paired_hidden()[None])
        return self.ending is None and self.has_pending

    def _paired_hidden(self) -> Tensor:
        """The hidden [H] of the last committed row, which a drafter starts from; zeros when its stamp is not current: the
        drafter then drafts blind, and the stream says the same (R-Q8)."""
        return self.last_hidden if self.sequence.hidden_is_own else torch.zeros_like(self.last_hidden)

    def draft_limit(self) -> int:
        """Most drafts of the next round: no row of it lies past the public stream (C1.5), the verify width or the
        blocks that the sequence has."""
        return max(0, min(self.rows_wanted, self.sequence.rows_left) - 1)

    @property
    def rows_wanted(self) -> int:
        """Rows that a full round takes."""
        budget = self.completion.budget_left + self.overshoot
        return min(self.shape.max_verify, budget, self.cache_max_ctx - self.committed_len)

    @property
    def rows_certain(self) -> int:
        """Rows that the stream may still commit, whatever it says; 0 where a fault lets it go past its end."""
        left = min(self.completion.budget_left, self.cache_max_ctx - self.committed_len)
        return 0 if self.overshoot else max(0, left)

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
            tap=self.taps,
        )

    def settle(self, drafts: Sequence[int], logits: Sequence[Row], hidden: Tensor) -> int:
        """Walk the verified columns: accept drafts while they are what the target picks. Answers the rows to commit.

        Column i decides position P + i + 1. The walk ends at the first pick that differs, at the last column, or with
        the stream; the last pick becomes the pending token. What is counted is what the stream took.
        """
        start, anchor = self.committed_len, self.pending_tok
        replayed = self.completion.replaying
        assert anchor is not None
        picks: list[int] = []
        taken, going = 0, True
        for column, row in enumerate(logits):
            token = self.completion.decide(self.picker.pick(row, start + column + 1))
            picks.append(token)
            if going:
                going = self.take(token, self._logprob(row, token))
                taken += 1
            if column == len(drafts) or token != drafts[column] or not (going or self.overshoot):
                break
        accepted = len(picks) - 1
        self.sequence.commit([anchor, *picks[:-1]], draft_rows=self.writes_draft_rows)
        self.tainted = self.tainted or len(picks) > taken
        self.last_hidden = hidden[accepted]
        if not replayed:
            self.counters.round(len(drafts), taken - 1)
        self.judge(len(drafts), taken - 1, replayed=replayed)
        self.pending_tok = picks[-1] if going else None
        if going:
            # Mostly all of them stand, and a slice of a tensor takes longer than the comparison.
            self.know(picks, hidden if accepted + 1 == len(hidden) else hidden[: accepted + 1])
        elif self.request.reuse == "decode":
            self.know(picks[:-1], hidden[:accepted])
        return accepted + 1

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Count a decided token and emit it, unless the journal has it. True = the stream goes on."""
        self.counters.replayed += self.completion.replaying
        return self.completion.take(token, logprob)

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

    # -- after the end ------------------------------------------------------------------------------------------

    def park(self) -> None:
        """Give everything back but the checkpoint, which the tree holds: the pending token is dropped, decode-made
        rows are freed (C1.3). Idempotent."""
        self.next_pred = self.pending_tok = None
        self.last_hidden = self.last_hidden.clone()  # it was a row among those of a whole launch
        self._give_back()

    def rewind_to_checkpoint(self, prompt: Sequence[int], cache: CacheManager) -> Decline | None:
        """Go back to the checkpoint if `prompt` goes on from it. Null: `committed` ends at `rewind_pos`, nothing is
        decided or pending, and the caller gives the suffix. A refusal changes nothing (R-S13)."""
        declined = self._declined(prompt, cache)
        if declined is None:
            self.park()
            self.reset_graph_fallback_on_resume()
        return declined

    def reset_graph_fallback_on_resume(self) -> None:
        """Let a resumed session try graphs again after one failed (R-S18)."""
        self.graphs.reset()

    def _logprob(self, row: Row, token: int) -> TokenLogprob | None:
        top = self.request.top_logprobs
        return None if top is None else token_logprob(row, token, top)
