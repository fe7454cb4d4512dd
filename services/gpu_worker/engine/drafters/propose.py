"""Asks drafters of every kind at once: heads run in step, one launch a depth; the others answer by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from services.gpu_worker.engine.drafters.base import DraftForward, DraftJob
from services.gpu_worker.engine.drafters.mtp import MtpDrafter, draft_chains
from services.gpu_worker.engine.drafters.ngram import NgramDrafter

AnyDrafter: TypeAlias = MtpDrafter | NgramDrafter


def propose(jobs: Sequence[tuple[AnyDrafter, DraftJob]], runner: DraftForward) -> list[list[int]]:
    """Drafts of each job, in order, at most its `k`."""
    heads = [(drafter, job) for drafter, job in jobs if isinstance(drafter, MtpDrafter)]
    chains = iter(draft_chains(heads, runner) if heads else ())
    return [
        next(chains) if isinstance(drafter, MtpDrafter) else drafter.propose(job.k) for drafter, job in jobs
    ]
