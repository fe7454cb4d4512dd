"""The one round loop: draft, one verify over all sessions, accept. Plain decode is the same path with no drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import VerifyRows
from services.gpu_worker.engine.card_logits import DecidedRow, decide
from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.drafters.block import BlockDrafter
from services.gpu_worker.engine.drafters.mtp import MtpDrafter
from services.gpu_worker.engine.drafters.ngram import NgramDrafter
from services.gpu_worker.engine.drafters.propose import AnyDrafter, propose
from services.gpu_worker.engine.drafters.propose import Forward as DraftForward
from services.gpu_worker.engine.flights import By, WholeResult, WholeRow
from services.gpu_worker.engine.sampling import Row
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.mtp import SpecSession
from shared.errors import EngineFault


class Forward(DraftForward, Protocol):
    """The part of the runner that a round uses."""

    @property
    def uncaptured(self) -> bool: ...

    @property
    def runs_whole(self) -> bool: ...

    def whole(self, rows: Sequence[WholeRow], *, more: bool = False) -> list[WholeResult]: ...

    def land(self, but: Collection[int] = ()) -> None: ...

    def verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]: ...

    def accept(self, slot: int, rows: int) -> None: ...


def run_round(sessions: Sequence[Session], runner: Forward, *, more: bool = False) -> bool:
    """Advance every session that has not ended by one verify pass. False when none could.

    `more` = another round of the same sessions is meant to follow; `runner.land` must come before a slot is given away.
    """
    live = [session for session in sessions if session.open()]
    whole = [session for session in live if runner.runs_whole and session.picked_anywhere]
    stepped = [session for session in live if session not in whole]
    for group, run in ((whole, partial(_run_whole, more=more)), (stepped, _run_stepped)):
        if group:
            run(group, runner)
            if runner.uncaptured:
                for session in group:
                    session.graphs.mark()
    return bool(live)


def _run_stepped(live: Sequence[Session], runner: Forward) -> None:
    """The host drafts and walks, row by row: on the CPU all streams, on a card those whose rows it cannot pick, since the
    rules need the stream's history or a mask, or somebody asked for log probabilities (`Session.picked_anywhere`)."""
    drafts = _propose(live, runner)
    rows = [session.verify_rows(tokens) for session, tokens in zip(live, drafts, strict=True)]
    hiddens = runner.verify(rows)
    logits = runner.logits(torch.cat(hiddens)).numpy()
    decide(
        logits,
        (
            session.picker.ask(row.start + 1 + i)
            for session, row in zip(live, rows, strict=True)
            for i in range(len(row.tokens))
        ),
    )
    first = 0
    for session, tokens, hidden in zip(live, drafts, hiddens, strict=True):
        columns = len(tokens) + 1
        _settle(session, runner, tokens, list(logits[first : first + columns]), hidden)
        first += columns


def _run_whole(live: Sequence[Session], runner: Forward, *, more: bool) -> None:
    """The card drafts, verifies and picks; what it picked is walked here, by the same rules."""
    rows = [_whole_row(session, runner) for session in live]
    propose(_aside(live), runner)
    results = runner.whole(rows, more=more)
    for session, result in zip(live, results, strict=True):
        _settle(session, runner, result.drafts, [DecidedRow(token) for token in result.picks], result.hidden)


def _settle(
    session: Session, runner: Forward, drafts: Sequence[int], rows: Sequence[Row], hidden: Tensor
) -> None:
    try:
        runner.accept(session.sequence.ssm_slot_idx(), session.settle(drafts, rows, hidden))
    except EngineFault as fault:
        session.fail(fault.code, fault.message)


def _whole_row(session: Session, runner: Forward) -> WholeRow:
    """The anchor and its drafts: journalled tokens, what an index proposes, or as many as the card shall make."""
    job = session.draft_job() if isinstance(session, SpecSession) else None
    given, k, by, catch_up, rungs = session.replay_drafts() or [], 0, By.HOST, None, 0
    if job is not None:
        drafter, wanted = job
        asked = wanted.k > 0 and not given
        match drafter:
            case MtpDrafter() if asked and drafter.backlog:
                k, by, catch_up = wanted.k, By.HEAD, drafter.take(wanted.block_table)
            case BlockDrafter() if asked and drafter.anchor is not None:
                k, by, rungs = wanted.k, By.BLOCK, wanted.rungs
            case NgramDrafter() | MtpDrafter():
                proposed = propose([job], runner)[0]
                given = given or proposed
    rows = session.verify_rows(given)
    return WholeRow(
        slot=rows.slot,
        start=rows.start,
        anchor=rows.tokens[0],
        block_table=rows.block_table,
        rules=session.request.sampling,
        choice=session.request.choice,
        given=given,
        k=k,
        by=by,
        catch_up=catch_up,
        rungs=rungs,
        tap=rows.tap,
        left=session.rows_certain,
        stops=session.request.stop_ids | session.request.last_ids,
        eager=rows.eager,
    )


def _aside(live: Sequence[Session]) -> list[tuple[AnyDrafter, DraftJob]]:
    """Drafters that do not propose in this round and keep up all the same."""
    return [job for session in live if isinstance(session, SpecSession) for job in session.side_jobs()]


def _propose(live: Sequence[Session], runner: Forward) -> list[list[int]]:
    """Drafts of every session: journalled tokens first, else what its drafter says, else none."""
    jobs = {}
    for index, session in enumerate(live):
        job = session.draft_job() if isinstance(session, SpecSession) else None
        if job is not None:
            jobs[index] = job
    drafts = dict(zip(jobs, propose([*jobs.values(), *_aside(live)], runner), strict=False))
    return [session.replay_drafts() or drafts.get(index, []) for index, session in enumerate(live)]
