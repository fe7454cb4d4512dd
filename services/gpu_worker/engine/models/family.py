"""What the engine asks of a model, whatever its family."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels import matmul
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.layers.mtp_head import MTPHead
from services.gpu_worker.engine.layers.steps import Step
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.placement import Placement


class Model(Protocol):
    """Weights in their place; stateless between calls."""

    @property
    def dims(self) -> ModelDims: ...

    @property
    def recipe(self) -> matmul.Recipe:
        """How its products are computed."""
        ...

    @property
    def rope(self) -> Tensor:
        """[positions, 2, rotary_dim / 2] of the full-attention layers."""
        ...

    @property
    def local_rope(self) -> Tensor | None:
        """The same of the sliding layers; null when there are none."""
        ...

    @property
    def placement(self) -> Placement:
        """Where it lives."""
        ...

    @property
    def mtp(self) -> MTPHead | None: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[M] int64 -> [M, H]."""
        ...

    def trunk(self, x: Tensor, step: Step, taps: Taps | None = None) -> Tensor:
        """Embedded rows [M, H], overwritten -> hidden after the final norm; `taps` see the layers on the way."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        ...

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] of the draft plane -> [R, V'] float32 over the first V' ids, which drafts made on a card come from."""
        ...
