"""Logits that stay on the card until somebody needs their values: most rows only need a token, and 4 bytes tell it.

`CardLogits` is what a card's runner answers where the CPU's answers a tensor; `numpy()` gives its rows. A row is picked from
where it lies (`pick`), or turns into host memory by numpy's own protocol, `np.asarray(row)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import sampling
from services.gpu_worker.engine.requests import SamplingParams
from shared.errors import EngineFault


class CardRow(ABC):
    """One row of logits of a card."""

    @abstractmethod
    def pick(self, rules: SamplingParams, position: int, choice: int) -> int:
        """The token at `position` by rules that `device_pickable` allows; -1 = no finite largest value. Waits for it."""

    @abstractmethod
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        """Its values [V] in host memory. Raises EngineFault when they are gone."""


class Ask(NamedTuple):
    """What a row shall be picked for: rules that `device_pickable` allows, and the position of the token."""

    rules: SamplingParams
    position: int
    choice: int


class HeldRow(CardRow):
    """A row that lies on the card."""

    def __init__(self, row: Tensor) -> None:
        """[1, V] float32."""
        self.values = row
        self._told: tuple[Ask, int] | None = None

    def tell(self, ask: Ask, token: int) -> None:
        """What the card picked for this ask, so that it need not be waited for again."""
        self._told = ask, token

    def pick(self, rules: SamplingParams, position: int, choice: int) -> int:
        ask = Ask(rules, position, choice)
        if self._told is None or self._told[0] != ask:
            decide([self], [ask])
        assert self._told is not None  # by `decide`
        return self._told[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        return self.values[0].cpu().numpy().astype(dtype or np.float32, copy=False)


def decide(rows: NDArray[np.float32] | Sequence[object], asks: Iterable[Ask | None]) -> None:
    """Pick from all rows that lie on a card in one launch, for asks that are expected; null = the host picks there. Rows
    in host memory are left alone."""
    if isinstance(rows, np.ndarray):
        return
    held = [
        (row, ask)
        for row, ask in zip(rows, asks, strict=True)
        if isinstance(row, HeldRow) and ask is not None
    ]
    if not held:
        return
    logits = torch.cat([row.values for row, _ in held])
    plan = sampling.PickPlan.empty(len(held), 1, truncate=any(ask.rules.top_k > 0 for _, ask in held))
    plan.fill([ask.rules for _, ask in held], [ask.choice for _, ask in held], vocab=logits.shape[1])
    plan.starts.copy_(torch.tensor([ask.position - 1 for _, ask in held]))
    tokens = sampling.pick(logits, plan.to(logits.device)).ids.tolist()
    for (row, ask), token in zip(held, tokens, strict=True):
        row.tell(ask, token)


class DecidedRow(CardRow):
    """A row whose token a card picked already, by the rules and for the position that it was asked for."""

    def __init__(self, token: int) -> None:
        self._token = token

    def pick(self, rules: SamplingParams, position: int, choice: int) -> int:
        return self._token

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        raise EngineFault("the values of a row that a card picked from are gone")


class CardLogits:
    """[R, V] float32 on a card."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[CardRow]:
        return (HeldRow(self._rows[number : number + 1]) for number in range(len(self._rows)))

    def numpy(self) -> list[CardRow]:
        """The rows, which are not copied yet."""
        return list(self)

    def cpu(self) -> Tensor:
        """All of it in host memory."""
        return self._rows.cpu()

    def argmax(self, dim: int = -1) -> Tensor:
        """Of every row, in host memory."""
        return torch.argmax(self._rows, dim).cpu()


Logits: TypeAlias = Tensor | CardLogits
"""What a runner answers: either has `numpy()` and `cpu()`."""
