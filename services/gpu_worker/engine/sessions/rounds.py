"""The one round loop: draft, one verify over all sessions, accept. Plain decode is the same path with no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import VerifyRows
from services.gpu_worker.engine.drafters.base import DraftForward
from services.gpu_worker.engine.drafters.propose import propose
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.mtp import SpecSession
from shared.errors import EngineFault


class Forward(DraftForward, Protocol):
    """The part of the runner that a round uses."""

    def verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]: ...

    def accept(self, slot: int, rows: int) -> None: ...


def run_round(sessions: Sequence[Session], runner: Forward) -> bool:
    """Advance every session that has not ended by one verify pass. False when none could."""
    live = [session for session in sessions if session.open()]
    if not live:
        return False
    drafts = _propose(live, runner)
    rows = [session.verify_rows(tokens) for session, tokens in zip(live, drafts, strict=True)]
    hiddens = runner.verify(rows)
    logits = runner.logits(torch.cat(hiddens)).numpy()
    first = 0
    for session, tokens, hidden in zip(live, drafts, hiddens, strict=True):
        columns = len(tokens) + 1
        try:
            runner.accept(
                session.sequence.ssm_slot_idx(),
                session.settle(tokens, list(logits[first : first + columns]), hidden),
            )
        except EngineFault as fault:
            session.fail(fault.code, fault.message)
        first += columns
    return True


def _propose(live: Sequence[Session], runner: Forward) -> list[list[int]]:
    """Drafts of every session: journalled tokens first, else what its drafter says, else none."""
    jobs = {}
    for index, session in enumerate(live):
        job = session.draft_job() if isinstance(session, SpecSession) else None
        if job is not None:
            jobs[index] = job
    drafts = dict(zip(jobs, propose(list(jobs.values()), runner), strict=True))
    return [session.replay_drafts() or drafts.get(index, []) for index, session in enumerate(live)]
