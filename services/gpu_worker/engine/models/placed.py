"""Weights on their way to where the model lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from services.gpu_worker.engine.placement import Placement


class Placed(Mapping[str, Tensor]):
    """Weights moved to their place as they are asked for, so that a large model never lies in two places whole."""

    def __init__(self, weights: Mapping[str, Tensor], placement: Placement) -> None:
        self._weights = weights
        self._placement = placement

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        matrix = weight.dim() == 2 or ".experts." in name
        return self._placement.matrix(weight) if matrix else self._placement.vector(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
