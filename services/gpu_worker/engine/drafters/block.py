"""The block drafter: several drafts from one pass over an anchor and masks, which reads the trunk's own layers.

What it knows of a sequence lies in the slot's ring of context rows, which the runner fills with rows that were committed;
here is only the asking. Drafts are picked left to right by the target's own rules, noise and history (C1.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.sampling import Row
from shared.errors import EngineFault


class Proposal(Protocol):
    """Rows of logits that a block proposes; see `models.block_heads`."""

    @property
    def count(self) -> int: ...

    def row(self, k: int, before: int) -> Row: ...

    def stands(self, k: int, before: int) -> bool: ...


class BlockForward(Protocol):
    """The part of the runner that the block drafter uses."""

    def propose(self, asks: Sequence[BlockAsk]) -> Sequence[Proposal]: ...


class BlockDrafter:
    """Of one sequence: where its next block begins."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.start = 0
        self.anchor: int | None = None

    def observe(self, start: int, tokens: Sequence[int], hiddens: Tensor) -> None:
        """See `Drafter.observe`: the newest token, which has no row yet, is the next anchor."""
        if tokens:
            self.start, self.anchor = start + len(tokens) - 1, tokens[-1]


def draft_blocks(jobs: Sequence[tuple[BlockDrafter, DraftJob]], runner: BlockForward) -> list[list[int]]:
    """One pass over all blocks that want drafts; at most `k` each, the same whatever the company."""
    drafts: list[list[int]] = [[] for _ in jobs]
    asking = [
        number for number, (drafter, job) in enumerate(jobs) if job.k > 0 and drafter.anchor is not None
    ]
    asks = [
        BlockAsk(slot=drafter.slot, start=drafter.start, anchor=drafter.anchor, k=job.k)
        for drafter, job in (jobs[number] for number in asking)
        if drafter.anchor is not None
    ]
    if asks:
        for number, ask, proposal in zip(asking, asks, runner.propose(asks), strict=True):
            drafts[number] = _walk(ask, jobs[number][1], proposal)
    return drafts


def _walk(ask: BlockAsk, job: DraftJob, proposal: Proposal) -> list[int]:
    """Pick draft after draft. A broken row ends the walk: it costs drafts, never the request."""
    drafts: list[int] = []
    before = ask.anchor
    try:
        for k in range(min(job.k, proposal.count)):
            if not proposal.stands(k, before):
                break
            before = job.picker.pick(proposal.row(k, before), ask.start + 1 + k)
            job.picker.record(before)
            drafts.append(before)
    except EngineFault:
        pass  # what was picked so far stands
    finally:
        for token in drafts:
            job.picker.forget(token)
    return drafts
