"""A mixture of experts in the place of the feed-forward layer, with one shared expert that every row passes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import experts, matmul
from services.gpu_worker.engine.layers.mlp import MLP


class Mixture:
    """sum of the k best experts by weight, in router-rank order, + sigmoid(shared gate) * shared expert."""

    def __init__(
        self, router: matmul.Packed, packed: experts.PackedExperts, shared: MLP, experts_per_row: int
    ) -> None:
        """router [E + 1, H]: a row an expert, then the shared expert's gate."""
        self._router = router
        self._packed = packed
        self._shared = shared
        self._k = experts_per_row

    def __call__(self, x: Tensor, *, prefill: bool) -> Tensor:
        """[M, H] -> [M, H]."""
        logits = matmul.linear(x, self._router, prefill=prefill, out_dtype=torch.float32)
        routes = experts.route(logits[:, :-1].contiguous(), self._k)
        return experts.experts(
            x,
            routes,
            self._packed,
            prefill=prefill,
            shared=self._shared(x, prefill=prefill),
            shared_gate=logits[:, -1:].contiguous(),
        )
