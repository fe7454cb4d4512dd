"""What every drafter is asked by the round loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.card_logits import Logits
from services.gpu_worker.engine.sampling import TokenPicker


class DraftForward(Protocol):
    """The part of the runner that drafters use."""

    def draft(self, rows: Sequence[DraftRows]) -> list[Tensor]: ...

    def logits(self, hidden: Tensor) -> Logits: ...


class Drafter(Protocol):
    """Proposes tokens for one sequence. Its proposals never change what the sequence says, only how fast."""

    def observe(self, start: int, tokens: Sequence[int], hiddens: Tensor) -> None:
        """Tokens known for certain: x_start.. each with the true hidden [n, H] of the row before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftJob:
    """Ask for `k` drafts after the newest observed token; 0 = only keep up."""

    k: int
    picker: TokenPicker
    block_table: Sequence[int]
    rungs: int = 0
    """Columns of the widest verify where the width follows the last round's luck (`drafters.ladder`); 0 = it does not."""
