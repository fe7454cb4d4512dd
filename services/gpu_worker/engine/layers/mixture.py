"""A mixture of experts in the place of the feed-forward layer, perhaps with a shared expert that every row passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import experts, matmul
from services.gpu_worker.engine.layers.mlp import MLP

Choose = Callable[[Tensor], experts.Routes]
"""float32 router logits [M, E] -> the experts of each row."""


class Mixture:
    """sum of the chosen experts by weight, in the router's order, + the shared expert if there is one, times a sigmoid if it
    is gated."""

    def __init__(
        self,
        router: matmul.Packed,
        choose: Choose,
        packed: experts.PackedExperts,
        shared: MLP | None,
        *,
        gated: bool = False,
    ) -> None:
        """router [E, H], a row an expert; of a `gated` shared expert [E + 1, H], its gate last."""
        self._router = router
        self._choose = choose
        self._packed = packed
        self._shared = shared
        self._gated = gated

    def __call__(self, x: Tensor, *, prefill: bool) -> Tensor:
        """[M, H] -> [M, H]."""
        logits = matmul.linear(x, self._router, prefill=prefill, out_dtype=torch.float32)
        count = self._packed.experts
        return experts.experts(
            x,
            self._choose(logits[:, :count].contiguous()),
            self._packed,
            prefill=prefill,
            shared=self._shared(x, prefill=prefill) if self._shared is not None else None,
            shared_gate=logits[:, count:].contiguous() if self._gated else None,
        )
