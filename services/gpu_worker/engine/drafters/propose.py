"""Asks drafters of every kind at once: heads run in step, one launch a depth; blocks in one pass; an index by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, assert_never

from services.gpu_worker.engine.drafters.base import DraftForward, DraftJob
from services.gpu_worker.engine.drafters.block import BlockDrafter, BlockForward, draft_blocks
from services.gpu_worker.engine.drafters.mtp import MtpDrafter, draft_chains
from services.gpu_worker.engine.drafters.ngram import NgramDrafter

AnyDrafter: TypeAlias = MtpDrafter | BlockDrafter | NgramDrafter


class Forward(DraftForward, BlockForward, Protocol):
    """What drafters of every kind use of the runner."""


def propose(jobs: Sequence[tuple[AnyDrafter, DraftJob]], runner: Forward) -> list[list[int]]:
    """Drafts of each job, in order, at most its `k`."""
    heads = [(drafter, job) for drafter, job in jobs if isinstance(drafter, MtpDrafter)]
    blocks = [(drafter, job) for drafter, job in jobs if isinstance(drafter, BlockDrafter)]
    chains = iter(draft_chains(heads, runner) if heads else ())
    passes = iter(draft_blocks(blocks, runner) if blocks else ())
    drafts: list[list[int]] = []
    for drafter, job in jobs:
        match drafter:
            case MtpDrafter():
                drafts.append(next(chains))
            case BlockDrafter():
                drafts.append(next(passes))
            case NgramDrafter():
                drafts.append(drafter.propose(job.k))
            case _:
                assert_never(drafter)
    return drafts
