"""Logits that stay on the card until somebody needs their values: most rows only need a token, and 4 bytes tell it.

`CardLogits` is what a card's runner answers where the CPU's answers a tensor; `numpy()` gives its rows. A row is picked from
where it lies (`pick`), or turns into host memory by numpy's own protocol, `np.asarray(row)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeAlias

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


class HeldRow(CardRow):
    """A row that lies on the card."""

    def __init__(self, row: Tensor) -> None:
        """[1, V] float32."""
        self._row = row

    def pick(self, rules: SamplingParams, position: int, choice: int) -> int:
        plan = sampling.PickPlan.empty(1, 1, truncate=rules.top_k > 0)
        plan.fill([rules], [choice], vocab=self._row.shape[1])
        plan.starts.fill_(position - 1)
        return int(sampling.pick(self._row, plan.to(self._row.device)).ids)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float32]:
        return self._row[0].cpu().numpy().astype(dtype or np.float32, copy=False)


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
