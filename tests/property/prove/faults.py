"""Faults to put into the engine: each is a bug that some serving engine once had, made silent where it would be loud."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kernels.gated_delta import ReplayPlan
from services.gpu_worker.engine import executor
from services.gpu_worker.engine.batch import PrefillChunk
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.events import TokenLogprob
from services.gpu_worker.engine.runner import ModelRunner
from services.gpu_worker.engine.sampling import TokenPicker
from services.gpu_worker.engine.sessions import base
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.prove import driver
from shared.protocol.chain import GRID

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`shows` = kinds of difference, one of which must be found; `fixed` = where it alone can show; `rules` = those of the
    streams that it can touch, if not all: groups with the most of them are played first."""

    install: Callable[[Patch], None]
    shows: frozenset[str]
    fixed: Mapping[str, str] = field(default_factory=dict)
    rules: frozenset[str] = frozenset()


def _one_row_lost(patch: Patch) -> None:
    """A full or partial accept folds one row less than it commits; positions say nothing of it."""
    accept = StatePool.accept

    def faulty(self: StatePool, slot: int, rows: int) -> None:
        accept(self, slot, rows)
        if rows > 1:
            self._fold[slot] -= 1
            self._position[slot] += 1

    patch.setattr(StatePool, "accept", faulty)


def _one_row_less_accepted(patch: Patch) -> None:
    """The same, loud: the next verify does not fit."""
    accept = ModelRunner.accept
    patch.setattr(ModelRunner, "accept", lambda self, slot, rows: accept(self, slot, max(1, rows - 1)))


def _stale_state(patch: Patch) -> None:
    """A restore moves the conv window and the position, and leaves the recurrent state of whoever was there."""
    restore = StatePool.restore

    def faulty(self: StatePool, snapshot: int, slot: int) -> None:
        before = self.state[:, slot].clone()
        restore(self, snapshot, slot)
        self.state[:, slot] = before

    patch.setattr(StatePool, "restore", faulty)


def _neighbours_penalties(patch: Patch) -> None:
    """Penalties are counted from the history that was written last, whosever it is."""
    record, penalise = TokenPicker.record, TokenPicker._penalise
    newest: list[np.ndarray] = []

    def recording(self: TokenPicker, token: int) -> None:
        record(self, token)
        if self._penalised:
            newest[:] = [self._counts]

    def faulty(self: TokenPicker, row: np.ndarray) -> None:
        own = self._counts
        self._counts = newest[0] if newest else own
        try:
            penalise(self, row)
        finally:
            self._counts = own

    patch.setattr(TokenPicker, "record", recording)
    patch.setattr(TokenPicker, "_penalise", faulty)


def _drafts_in_history(patch: Patch) -> None:
    """What a drafter looked ahead stays in the penalties' history."""
    patch.setattr(TokenPicker, "forget", lambda self, token: None)


def _fold_skipped(patch: Patch) -> None:
    """Accepted rows are never folded into the recurrent state."""
    build = ReplayPlan.build

    def faulty(slots: Sequence[int], folds: Sequence[int], *rest: Any) -> ReplayPlan:
        return build(slots, [0] * len(folds), *rest)

    patch.setattr(ReplayPlan, "build", faulty)


def _captured_one_block_late(patch: Patch) -> None:
    """A boundary's state is taken a block after it, under the boundary's name."""
    plan, capture, snapshot = Session._plan_cuts, CacheManager.capture, StatePool.take_snapshot

    def later(self: Session, cache: CacheManager) -> list[int]:
        return [cut + GRID for cut in plan(self, cache) if cut + GRID <= len(self.request.tokens)]

    def misnamed(self: CacheManager, request: Any, sequence: Any, position: int, hidden: Any) -> Any:
        early = SimpleNamespace(
            seq_len=position - GRID,
            ssm_slot_idx=sequence.ssm_slot_idx,
            block_table=sequence.block_table,
            from_decode=False,
            kv_valid_tokens=position,
        )
        return capture(self, request, cast("Any", early), position - GRID, hidden)

    def relabelled(self: StatePool, slot: int, number: int) -> None:
        snapshot(self, slot, number)
        self._snapshot_position[number] -= GRID

    patch.setattr(Session, "_plan_cuts", later)
    patch.setattr(CacheManager, "capture", misnamed)
    patch.setattr(StatePool, "take_snapshot", relabelled)


def _noise_by_draw(patch: Patch) -> None:
    """Noise is a function of how often one drew, not of the position."""
    noise_at = TokenPicker._noise_at
    draws: dict[int, int] = {}

    def faulty(self: TokenPicker, position: int) -> np.ndarray:
        draws[id(self)] = draws.get(id(self), 0) + 1
        return noise_at(self, self._prompt_len + draws[id(self)] - 1)

    patch.setattr(TokenPicker, "_noise_at", faulty)


def _logprobs_zero(patch: Patch) -> None:
    """Every accepted token is certain, says the server."""
    patch.setattr(base, "token_logprob", lambda row, token, top: TokenLogprob(token=token, logprob=0.0))


def _last_token_lost(patch: Patch) -> None:
    """A burst of several tokens is delivered without its last one."""
    drain = Session.drain
    patch.setattr(Session, "drain", lambda self: (lambda got: got[:-1] if len(got) > 2 else got)(drain(self)))


def _other_slots_rows(patch: Patch) -> None:
    """Hiddens of a batched verify come back in another order than they went in."""
    verify = ModelRunner.verify

    def faulty(self: ModelRunner, rows: Sequence[Any]) -> list[torch.Tensor]:
        hiddens = verify(self, rows)
        same = all(len(row.tokens) == len(rows[0].tokens) for row in rows)
        return hiddens[::-1] if same else hiddens

    patch.setattr(ModelRunner, "verify", faulty)


def _flush_skipped(patch: Patch) -> None:
    """A demotion hands the pending token over as if it had not been emitted."""

    def faulty(sessions: Sequence[Any], runner: object) -> None:
        for session in sessions:
            if session.has_pending:
                session.next_pred, session.pending_tok = session.pending_tok, None

    patch.setattr(executor, "flush_pending", faulty)


def _slot_not_reset(patch: Patch) -> None:
    """A cold sequence starts from the recurrent state that its slot was left with."""

    def faulty(self: StatePool, slot: int) -> None:
        self._position[slot] = self._fold[slot] = self._open[slot] = 0

    patch.setattr(StatePool, "reset", faulty)


def _wrong_draft_pairing(patch: Patch) -> None:
    """A chunk's first draft row is paired with a zero hidden. No token may change: it costs acceptance alone."""
    prefill = ModelRunner.prefill

    def faulty(self: ModelRunner, chunks: Sequence[PrefillChunk]) -> list[torch.Tensor]:
        blind = [replace(chunk, previous_hidden=torch.zeros_like(chunk.previous_hidden)) for chunk in chunks]
        return prefill(self, blind)

    patch.setattr(ModelRunner, "prefill", faulty)


def _overshoot_lost(patch: Patch) -> None:
    """Accepted drafts past the end are cut from `committed` though their rows are in the cache."""
    settle = Session.settle

    def faulty(self: Session, *args: Any) -> int:
        rows = settle(self, *args)
        if self.tainted:
            del self.committed[len(self.request.tokens) + self.completion_tokens - 1 :]
        return rows

    patch.setattr(Session, "settle", faulty)


def _handed_over_with_overshoot(patch: Patch) -> None:
    """A hand-off neither minds rows that the stream does not have nor compares their number."""
    patch.setattr(SpecSession, "demote_ready", property(lambda self: self.next_pred is not None))
    whole = driver.hand_off
    patch.setattr(driver, "hand_off", lambda session, fed: whole(session, session.committed_len))


def _hidden_not_stored(patch: Patch) -> None:
    """A capture forgets the hidden of its last row, from which an exact hit decides the first token."""
    capture = CacheManager.capture

    def faulty(self: CacheManager, request: Any, sequence: Any, position: int, hidden: torch.Tensor) -> Any:
        return capture(self, request, sequence, position, torch.zeros_like(hidden))

    patch.setattr(CacheManager, "capture", faulty)


PENALISED = frozenset({"greedy, penalties", "sampled, penalties, stops"})
STREAM = frozenset({"tokens", "logprobs", "ending", "recurrent state", "kv rows", "conv window"})

OVERSHOT = {"way": "overshot", "drafter": "mtp K=5", "rule": "sampled", "budget": "32 tokens"}
FAULTS = {
    "r_s4 accepted count off by one, silent": Fault(
        install=_one_row_lost, shows=frozenset({"recurrent state"})
    ),
    "r_s4 accepted count off by one, loud": Fault(
        install=_one_row_less_accepted, shows=frozenset({"engine"})
    ),
    "fr_7 stale recurrent state on restore": Fault(install=_stale_state, shows=STREAM),
    "fr_38 neighbour's penalty row": Fault(
        install=_neighbours_penalties, shows=frozenset({"tokens"}), rules=PENALISED
    ),
    "fr_38 drafts stay in the history": Fault(
        install=_drafts_in_history, shows=frozenset({"tokens"}), rules=PENALISED
    ),
    "r_s4 skipped fold": Fault(install=_fold_skipped, shows=frozenset({"recurrent state"})),
    "r_s5 capture one block late": Fault(install=_captured_one_block_late, shows=STREAM),
    "fr_36 noise by draw": Fault(install=_noise_by_draw, shows=frozenset({"tokens"})),
    "fr_33 log probabilities of zero": Fault(install=_logprobs_zero, shows=frozenset({"logprobs"})),
    "fr_26 a burst loses its last token": Fault(install=_last_token_lost, shows=frozenset({"tokens"})),
    "r_s17 skipped flush at a demotion": Fault(install=_flush_skipped, shows=frozenset({"tokens"})),
    "fr_6 a slot is not reset": Fault(install=_slot_not_reset, shows=STREAM),
    "r_s1 overshoot is lost": Fault(install=_overshoot_lost, shows=frozenset({"engine"}), fixed=OVERSHOT),
    "r_s16 handed over with overshoot": Fault(
        install=_handed_over_with_overshoot, shows=frozenset({"engine"}), fixed=OVERSHOT
    ),
    "r_q6 the last hidden is not stored": Fault(
        install=_hidden_not_stored,
        shows=frozenset({"tokens", "logprobs"}),
        fixed={"prompt": "on the grid", "cache": "exact hit"},
    ),
    "fr_2 rows in another order": Fault(install=_other_slots_rows, shows=STREAM),
}
DRAFT_PAIRING = _wrong_draft_pairing
