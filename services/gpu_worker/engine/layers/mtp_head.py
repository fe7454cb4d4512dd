"""The MTP head: what pairs a token with the hidden before it and proposes the one after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import matmul, norm_rope
from services.gpu_worker.engine.layers.block import Block
from services.gpu_worker.engine.layers.steps import AttentionStep


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MTPHead:
    """Row p: projection([norm_e(emb(x_p)) ; norm_h(h_{p-1})]), one decoder block, a final norm. Scales [H] are what their
    norms multiply by."""

    embedding_scale: Tensor
    hidden_scale: Tensor
    projection: matmul.Packed
    block: Block
    final_scale: Tensor
    eps: float

    def __call__(self, embedded: Tensor, hiddens: Tensor, step: AttentionStep) -> Tensor:
        """embedded, hiddens [M, H] -> y [M, H]; writes the draft plane."""
        left = norm_rope.rms_norm(embedded, self.embedding_scale, self.eps)
        right = norm_rope.rms_norm(hiddens, self.hidden_scale, self.eps)
        x = matmul.linear(torch.cat([left, right], dim=-1), self.projection, prefill=step.prefill)
        return norm_rope.add_rms_norm(x, self.block(x, None, step), self.final_scale, self.eps)
