"""The prompt side of a session: what is primed, where it is captured, and the checkpoint that outlives the decode.

Knows the prompt's rows and the cache. Does not know what is sampled from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.captures import CaptureFailed
from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.card_logits import Logits
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sampling import token_logprob
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.outcome import Checkpoint, Decline, DeclineReason, SessionShape
from services.gpu_worker.engine.sessions.telemetry import SessionCounters
from shared.errors import EngineFault


class PromptSide:
    """Primes a prompt on the grid and keeps its boundaries."""

    def __init__(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        shape: SessionShape,
        *,
        last_hidden: Tensor,
        capture_disabled: bool,
        counters: SessionCounters,
    ) -> None:
        """`last_hidden` [H] belongs to the row before the first one to prime, zeros when there is none."""
        self.request = request
        self.sequence = sequence
        self.shape = shape
        sequence.collect_prompt_logprobs = request.prompt_logprobs
        self.last_hidden = last_hidden
        self.capture_disabled = capture_disabled
        self.counters = counters
        self.chunks = 0
        self.undecided = False
        """Resumed where the journal ends: the token after the newest row is not known."""
        self.boundary_captures: list[Capture] = []
        self._capture_at = _to_grid(request.capture_at)
        self._ckpt_at = _to_grid(request.ckpt_at)
        self._checkpoint: Checkpoint | None = None

    @property
    def committed(self) -> list[int]:
        """Tokens in the cache, one a row."""
        return self.sequence.tokens

    @property
    def committed_len(self) -> int:
        return self.sequence.seq_len

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

    def drain_captures(self) -> list[Capture]:
        """What the prime kept, ascending; answered once (R-S6)."""
        captures, self.boundary_captures = self.boundary_captures, []
        return captures

    def leftover_captures(self) -> list[Capture]:
        """The same, when nothing more is to come of the session: those that waited for something too."""
        return self.drain_captures()

    @property
    def defers(self) -> bool:
        """Whether a drafter takes the prompt's rows in later."""
        return False

    # -- prime --------------------------------------------------------------------------------------------------

    @property
    def primed(self) -> bool:
        """Whether the whole prompt is in the cache, and not only restored: its end can be read."""
        return self.sequence.prompt_len is not None and self.prime_left <= 0

    @property
    def prime_left(self) -> int:
        """Prompt rows to compute."""
        return max(0, len(self.request.tokens) - self.committed_len)

    def restored(self, cache: CacheManager) -> Tensor:
        """The whole prompt came from the cache (R-Q6), or all that was said so far: nothing is computed. Answers the
        stored hidden [1, H] of the last row, which decides the next token. Raises EngineFault when rows are missing."""
        whole = self.sequence.marconi_exact_snap is not None or self.undecided
        if not whole or self.prime_left:
            raise EngineFault(f"{self.prime_left} prompt rows are to be computed, none is restored")
        self.sequence.begin_prompt(len(self.request.tokens))
        self._keep_checkpoint(cache)
        return self.last_hidden[None]

    @property
    def append_width(self) -> int:
        """Prompt rows up to the next grid position, of a turn that goes on from decode-made rows; 0 on the grid."""
        off = self.sequence.from_decode and self.committed_len % BLOCK_ROWS
        return min(BLOCK_ROWS - off, self.prime_left) if off else 0

    def append_launch(self) -> VerifyRows:
        """The next of them, as columns of one verify."""
        self.sequence.begin_prompt(len(self.request.tokens))
        start = self.committed_len
        return VerifyRows(
            slot=self.sequence.ssm_slot_idx(),
            start=start,
            tokens=self.request.tokens[start : start + min(self.append_width, self.shape.max_verify)],
            block_table=self.sequence.block_table,
            tap=self.taps,
        )

    def appended(self, rows: VerifyRows, hidden: Tensor) -> None:
        """Commit such a launch's rows (`hidden` [n, H])."""
        before = torch.cat([self.last_hidden[None], hidden[:-1]])
        self.sequence.commit(list(rows.tokens), draft_rows=self.writes_draft_rows)
        self.last_hidden = hidden[-1].clone()
        self.chunks += 1
        self.know_prompt(rows.tokens, before)

    @property
    def writes_draft_rows(self) -> bool:
        """Whether decoded rows get into the draft plane too."""
        return False

    @property
    def taps(self) -> bool:
        """Whether a block drafter takes verified rows in."""
        return False

    def know_prompt(self, tokens: Sequence[int], hiddens: Tensor) -> None:
        """Prompt rows that no prefill made; `hiddens` [n, H] of the rows before them. For drafters."""

    def take_draft_rows(self) -> DraftRows | None:
        """Draft rows that wait; null without a head."""
        return None

    def resume_prompt(self, cache: CacheManager) -> None:
        """All prompt rows are there, and rows beyond them: nothing is left to prime."""
        self.sequence.begin_prompt(len(self.request.tokens))
        self._keep_checkpoint(cache)

    def next_chunk(self, budget: int, cache: CacheManager) -> PrefillChunk:
        """Prompt rows for one launch: at most `budget` (a multiple of 64), ending on a boundary where there is one."""
        start = self.committed_len
        meta = self.sequence.chunked_prefill_meta
        if meta is None:
            meta = self.sequence.plan_prefill(self._plan_cuts(cache))
            self._keep_checkpoint(cache)
        self.sequence.begin_prompt(len(self.request.tokens))
        cut = next((position for position in meta.cuts if position > start), len(self.request.tokens))
        stop = min(start + budget, cut, len(self.request.tokens))
        return PrefillChunk(
            slot=self.sequence.ssm_slot_idx(),
            start=start,
            tokens=self.request.tokens[start:stop],
            block_table=self.sequence.block_table,
            previous_hidden=self.last_hidden,
            defer=self.defers,
        )

    def prefilled(self, chunk: PrefillChunk, hidden: Tensor, cache: CacheManager) -> None:
        """Commit a chunk's rows (`hidden` [n, H]) and capture where it ended on a boundary."""
        self.sequence.commit(list(chunk.tokens))
        self.last_hidden = hidden[-1].clone()
        self.chunks += 1
        meta = self.sequence.chunked_prefill_meta
        if meta is not None and self.committed_len in meta.cuts:
            try:
                capture = cache.capture(self.request, self.sequence, self.committed_len, self.last_hidden)
            except CaptureFailed:
                self.counters.capture_failures += 1
            else:
                if capture is not None:
                    self.boundary_captures.append(capture)
                self._keep_checkpoint(cache)

    def capture_here(self, cache: CacheManager) -> None:
        """The session is about to give way in mid prime: keep the rows that it has, so that it need not compute them
        again (FR-19). Off the grid, or before anything new, there is nothing to keep."""
        here = self.committed_len
        kept = self.request.use_cache and not (self.capture_disabled or self.sequence.from_decode)
        fresh = here > self.sequence.cached_prefix_tokens and here % BLOCK_ROWS == 0
        if self.primed or not fresh or not kept:
            return
        try:
            capture = cache.capture(self.request, self.sequence, here, self.last_hidden)
        except CaptureFailed:
            self.counters.capture_failures += 1
        else:
            if capture is not None:
                self.boundary_captures.append(capture)

    def score(self, chunk: PrefillChunk, hidden: Tensor, logits: Callable[[Tensor], Logits]) -> None:
        """Keep the log probability of every prompt token after a row of this chunk (`hidden` [n, H]), if somebody asked
        (R-Q20). One tile of rows at a time, so that memory does not grow with the chunk."""
        top = self.sequence.collect_prompt_logprobs
        if top is None:
            return
        following = self.request.tokens[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]
        for first in range(0, len(following), BLOCK_ROWS):
            tokens = following[first : first + BLOCK_ROWS]
            rows = logits(hidden[first : first + len(tokens)]).numpy()
            self.sequence.prompt_logprobs.extend(
                token_logprob(row, token, top) for row, token in zip(rows, tokens, strict=True)
            )

    def _plan_cuts(self, cache: CacheManager) -> list[int]:
        if not self.request.use_cache or self.capture_disabled or self.sequence.from_decode:
            return []
        return cache.boundaries(
            self.request, self.committed_len, self.capture_at, self._checkpoint_position()
        )

    def _checkpoint_position(self) -> int:
        prompt_end = len(self.request.tokens) // BLOCK_ROWS * BLOCK_ROWS
        return min(self.ckpt_at, prompt_end) if self.ckpt_at is not None else prompt_end

    def _keep_checkpoint(self, cache: CacheManager) -> None:
        """Note the turn's checkpoint once the tree holds its state; until then, and when it failed, there is none."""
        position = self._checkpoint_position()
        if self.request.use_cache and position and cache.has_state(self.request, position):
            key = self.request.chain[position // BLOCK_ROWS - 1]
            self._checkpoint = Checkpoint(key=key, position=position)

    # -- the checkpoint -----------------------------------------------------------------------------------------

    @property
    def rewind_pos(self) -> int | None:
        """Where the next turn could go on from; null without a checkpoint."""
        return self._checkpoint.position if self._checkpoint else None

    @property
    def rewind_key(self) -> bytes | None:
        """Chain key of the checkpoint; null without one."""
        return self._checkpoint.key if self._checkpoint else None

    def rewind_is_resident(self, cache: CacheManager) -> bool:
        """Whether the checkpoint's state is still there. Its rows then are too, those of sliding layers as well: a state is
        kept with the tail of their rows, whatever became of the ring that it was copied from (R-S14)."""
        return self._checkpoint is not None and cache.is_resident(self._checkpoint.key)

    def _give_back(self) -> None:
        """Give everything back but the checkpoint, which the tree holds: decode-made rows are freed
        (C1.3). Idempotent."""
        self.sequence.guard.release()
        del self.sequence.tokens[self.rewind_pos or 0 :]
        self.sequence.kv_valid_tokens = self.sequence.seq_len

    def _declined(self, prompt: Sequence[int], cache: CacheManager) -> Decline | None:
        """Why the checkpoint does not serve `prompt`; null = it does. Decided by exact tokens."""
        position = self.rewind_pos
        if position is None:
            return Decline(reason=DeclineReason.NO_CHECKPOINT, position=0)
        agreed = agreement(self.committed[:position], prompt)
        if agreed < position:
            return Decline(reason=DeclineReason.DIVERGED, position=agreed)
        if len(prompt) <= position:
            return Decline(reason=DeclineReason.NO_SUFFIX, position=agreed)
        if not self.rewind_is_resident(cache):
            return Decline(reason=DeclineReason.NOT_RESIDENT, position=agreed)
        return None


def _to_grid(position: int | None) -> int | None:
    return None if position is None else position // BLOCK_ROWS * BLOCK_ROWS


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of the common prefix."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
