"""What a check found: comparisons, differences, and the largest error against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

Check = Callable[["Ledger"], None]


@dataclass(slots=True)
class Ledger:
    """Filled by one check."""

    name: str
    comparisons: int = 0
    differences: int = 0
    first: str = ""
    """What differed first, or the error that ended the check."""
    error: float = 0.0
    limit: float = 0.0
    seconds: float = 0.0
    broken: bool = False
    """The check did not come to its end."""

    @property
    def holds(self) -> bool:
        """Whether it ran, compared something, found nothing and stayed within its error."""
        return not self.broken and self.comparisons > 0 and self.differences == 0 and self.error <= self.limit

    def equal(self, told: Tensor, expected: Tensor, what: str) -> None:
        """The same values; NaN equals NaN, which is what was not written."""
        self.comparisons += 1
        if told.shape == expected.shape and bool(
            ((told == expected) | (told.isnan() & expected.isnan())).all()
        ):
            return
        self.differences += 1
        self.first = self.first or what

    def close(self, told: Tensor, exact: Tensor, limit: float) -> None:
        """Relative error by norm against float64 values; a NaN never passes."""
        error = float((told.double() - exact).norm() / exact.norm().clamp(min=1e-30))
        self.error = max(self.error, error) if error == error else float("inf")
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Report:
    """All ledgers of a run."""

    ledgers: tuple[Ledger, ...] = field(default=())

    @property
    def holds(self) -> bool:
        return bool(self.ledgers) and all(ledger.holds for ledger in self.ledgers)

    @property
    def differences(self) -> int:
        return sum(ledger.differences + ledger.broken for ledger in self.ledgers)


def run(checks: Sequence[tuple[str, Check]], told: Callable[[Ledger], None]) -> Report:
    """Every check in turn; one that raises is a difference and the others still run."""
    ledgers = []
    for name, check in checks:
        ledger = Ledger(name)
        started = perf_counter()
        try:
            check(ledger)
        except Exception as error:  # noqa: BLE001 - a kernel that does not compile must not hide what the others do
            ledger.broken = True
            ledger.first = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ledger.seconds = perf_counter() - started
        ledgers.append(ledger)
        told(ledger)
    return Report(tuple(ledgers))


def poisoned_but(rows: Tensor, first: int, count: int) -> Tensor:
    """A copy whose rows outside [first, first + count) are NaN: another sequence's broken values. Indices stay."""
    if not rows.is_floating_point():
        return rows.clone()
    copy = torch.full_like(rows, torch.nan)
    copy[first : first + count] = rows[first : first + count]
    return copy
