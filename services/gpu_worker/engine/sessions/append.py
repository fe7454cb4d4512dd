"""Flush and append: a turn goes on from what the turn before decoded, under the opt-in `reuse = "decode"` (C1.3).

    end of a turn ──flush──> rows and state up to the last delivered token ──kept──> the next turn
    off the grid  ──append──> verify launches up to the next grid position ──> prefill on the grid, as ever

Rows from the kept position to the grid are in the decode regime, whatever the launches' widths: a row's bits are a
function of the sequence alone, so the same history gives the same stream, in any company, with any drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.handoff import FlushForward, flush_pending


class AppendForward(FlushForward, Protocol):
    """The part of the runner that an append uses."""

    def draft(self, rows: Sequence[DraftRows]) -> list[Tensor]: ...


def append_rows(session: Session, runner: AppendForward) -> Tensor:
    """One launch of prompt rows off the grid; answers their hiddens [n, H]. On the grid the slot is settled and the draft
    plane whole, so that prefill can go on."""
    rows = session.append_launch()
    # Those of the launch before: a call of the head takes few more rows than a verify.
    _write_draft_rows(session, runner)
    (hidden,) = runner.verify([rows])
    runner.accept(rows.slot, len(rows.tokens))
    session.appended(rows, hidden)
    if not session.append_width:
        runner.flush(rows.slot)
        if session.prime_left:
            _write_draft_rows(session, runner)
    return hidden


def _write_draft_rows(session: Session, runner: AppendForward) -> None:
    waiting = session.take_draft_rows()
    if waiting is not None:
        runner.draft([waiting])


def flush_ends(ends: Sequence[tuple[Session, int | None]], runner: FlushForward) -> None:
    """Bring ended sessions to the last delivered token: one single-row pass over all whose token (not null) has no row
    yet, and every fold applied. Raises what the launch raises; the states of its slots are undefined then."""
    for session, token in ends:
        session.end_of_turn(token)
    flush_pending([session for session, _ in ends], runner)
    for session, _ in ends:
        runner.flush(session.sequence.ssm_slot_idx())
