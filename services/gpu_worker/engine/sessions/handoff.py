"""Demotion: a speculative session's sequence goes on in plain batched decode.

    flush_pending   one single-row pass over all that leave: the pending token joins `committed`, the next one is decided
    hand_off        (sequence, next token) to a plain session, when the engine's own count agrees (R-S16)

The pass is the one that plain decode would have made for the same token, so a demotion costs no forward of its own.
There is no way back: a plain session leaves the draft plane's rows unwritten, and a head that reads them would guess
from nothing. A stream that was demoted stays plain to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import VerifyRows
from services.gpu_worker.engine.card_logits import Logits
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.mtp import SpecSession
from shared.errors import EngineFault


class FlushForward(Protocol):
    """The part of the runner that a hand-off uses."""

    def verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]: ...

    def accept(self, slot: int, rows: int) -> None: ...

    def flush(self, slot: int) -> None: ...

    def logits(self, hidden: Tensor) -> Logits: ...


def flush_pending(sessions: Sequence[Session], runner: FlushForward) -> None:
    """Bring every session with a pending token to a hand-off, or to the end of its turn (R-S4): nothing pending,
    `next_pred` set, the fold applied.

    Raises what the launch raises; a session whose row cannot be picked from ends with the fault, alone.
    """
    waiting = [session for session in sessions if session.has_pending]
    if not waiting:
        return
    hiddens = runner.verify([session.verify_rows(()) for session in waiting])
    logits = runner.logits(torch.cat(hiddens)).numpy()
    for session, hidden, row in zip(waiting, hiddens, logits, strict=True):
        slot = session.sequence.ssm_slot_idx()
        runner.accept(slot, 1)
        runner.flush(slot)
        try:
            session.flushed(row, hidden[0])
        except EngineFault as fault:
            session.fail(fault.code, fault.message)


def hand_off(session: SpecSession, fed: int) -> Session | None:
    """The plain session that goes on with the sequence. Null: the session is not ready, or holds other rows than the
    `fed` tokens that the engine knows of; it then finishes in place, untouched (R-S16)."""
    if session.committed_len != fed:
        return None
    logprob = session.next_logprob
    demoted = session.into_demoted()
    if demoted is None:
        return None
    sequence, token = demoted
    plain = Session(
        session.request,
        sequence,
        session.shape,
        last_hidden=session.last_hidden,
        capture_disabled=session.capture_disabled,
        counters=session.counters,
    )
    plain.go_on(session, token, logprob)
    return plain
