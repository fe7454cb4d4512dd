"""What a drafter reads of the trunk: the outputs of named layers, gathered while a pass runs. Without taps nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import norm_rope
from shared.errors import EngineFault


class Taps:
    """Of one pass. Layer j's output is the residual stream after layer j, 0-based, before the layers above change it."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers` ascending."""
        self._layers = tuple(layers)
        self._seen: list[Tensor] = []

    def see(self, layer: int, x: Tensor, delta: Tensor | None = None) -> None:
        """A layer left `x` [M, H], to which `delta` is still to be added ([M, H], or [slices, M, H])."""
        if layer not in self._layers:
            return
        if delta is None:
            self._seen.append(x.clone())
        else:
            self._seen.append(x + norm_rope.added(delta, x.dtype))

    def rows(self) -> Tensor:
        """[M, taps * H]. Raises EngineFault when a tapped layer did not run."""
        if len(self._seen) != len(self._layers):
            raise EngineFault(f"{len(self._seen)} of the tapped layers {list(self._layers)} ran")
        return torch.cat(self._seen, dim=-1)
