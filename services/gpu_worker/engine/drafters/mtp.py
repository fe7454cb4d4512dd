"""The MTP drafter: a chain of one-token drafts by the model's multi-token-prediction head.

The draft plane's row p pairs token x_p with the hidden of its predecessor h_{p-1}, and proposes x_{p+1}. Rows of
accepted tokens are written with the target's hiddens; a chain goes on with the head's own output in their place, and
those rows are written over once the truth is known. So the row of the newest token, which needs no guess, is the
last row of the catch-up and the first draft at once: a chain of k costs k calls.

Drafts are picked by the target's own rules, noise and history, which is what makes sampled drafts agree (C1.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.card_logits import decide
from services.gpu_worker.engine.drafters.base import DraftForward, DraftJob
from services.gpu_worker.engine.sampling import Row
from services.gpu_worker.engine.sequence import ProposerState
from shared.errors import EngineFault

BACKLOG_ROWS: Final = 8
"""Observed rows that may wait before they are written even though no draft was asked for."""


class MtpDrafter:
    """Rows of one sequence that are known but not yet in the draft plane."""

    def __init__(self, state: ProposerState | None = None) -> None:
        """`state` = what a drafter of the same rows knew; null = nothing is known yet."""
        self._start = state.start if state else 0
        self._tokens: list[int] = list(state.tokens) if state else []
        self._hiddens: list[Tensor] = list(state.hiddens) if state else []

    def state(self) -> ProposerState:
        """What it knows, for another drafter to go on with."""
        return ProposerState(start=self._start, tokens=tuple(self._tokens), hiddens=tuple(self._hiddens))

    def observe(self, start: int, tokens: Sequence[int], hiddens: Tensor) -> None:
        """See `Drafter.observe`; rows must follow one another."""
        if not self._tokens:
            self._start = start
        self._tokens.extend(tokens)
        self._hiddens.append(hiddens)

    @property
    def backlog(self) -> int:
        """Rows that wait."""
        return len(self._tokens)

    @property
    def next_position(self) -> int:
        """Position of the first token after the observed ones."""
        return self._start + len(self._tokens)

    def take(self, block_table: Sequence[int]) -> DraftRows:
        """The waiting rows, which then wait no longer."""
        hiddens = torch.cat(self._hiddens) if len(self._hiddens) > 1 else self._hiddens[0]
        rows = DraftRows(start=self._start, tokens=self._tokens, hiddens=hiddens, block_table=block_table)
        self._tokens, self._hiddens = [], []
        return rows


def draft_chains(jobs: Sequence[tuple[MtpDrafter, DraftJob]], runner: DraftForward) -> list[list[int]]:
    """Run all chains in step, one call of the head a depth: `k` drafts each, the same whatever the company."""
    chains: list[_Chain] = []
    drafts: list[list[int]] = []
    rows: list[DraftRows] = []
    for drafter, job in jobs:
        drafts.append([])
        if drafter.backlog and (job.k > 0 or drafter.backlog >= BACKLOG_ROWS):
            chains.append(_Chain(job, drafts[-1], drafter.next_position))
            rows.append(drafter.take(job.block_table))
    try:
        while rows:
            ends = [hidden[-1:] for hidden in runner.draft(rows)]
            chains, rows = _advance(chains, ends, runner)
    finally:
        for (_, job), chain in zip(jobs, drafts, strict=True):
            for token in chain:
                job.picker.forget(token)
    return drafts


class _Chain:
    """One sequence's chain in the making: `position` is where the next draft stands, `left` how many are wanted."""

    def __init__(self, job: DraftJob, drafts: list[int], position: int) -> None:
        self.job = job
        self.drafts = drafts
        self.position = position
        self.left = job.k

    def extend(self, logits: Row) -> bool:
        """Pick the next draft. False ends the chain: a broken row costs its drafts, never the request."""
        try:
            token = self.job.picker.pick(logits, self.position)
        except EngineFault:
            return False
        self.job.picker.record(token)
        self.drafts.append(token)
        self.position += 1
        self.left -= 1
        return self.left > 0


def _advance(
    chains: Sequence[_Chain], ends: Sequence[Tensor], runner: DraftForward
) -> tuple[list[_Chain], list[DraftRows]]:
    """Pick one draft a chain from its newest row [1, H]; answers the chains that go on and their next rows."""
    wanting = [(chain, end) for chain, end in zip(chains, ends, strict=True) if chain.left > 0]
    if not wanting:
        return [], []
    logits = runner.logits(torch.cat([end for _, end in wanting])).numpy()
    decide(logits, (chain.job.picker.ask(chain.position) for chain, _ in wanting))
    going, rows = [], []
    for (chain, end), row in zip(wanting, logits, strict=True):
        if chain.extend(row):
            going.append(chain)
            rows.append(
                DraftRows(
                    start=chain.position - 1,
                    tokens=[chain.drafts[-1]],
                    hiddens=end,
                    block_table=chain.job.block_table,
                )
            )
    return going, rows
