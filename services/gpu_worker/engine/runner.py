"""Runs the model on rows: prefill on the grid, verify (plain decode is one column), drafts of the MTP head.

Owns no memory: KV blocks and recurrent slots are the pools', and who may use which is decided above.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig, ModelDims


class ModelRunner:
    """One forward a call, float32. Every row's bits are a function of its sequence alone (C1).

    Misuse (a start where the slot's state is not valid, a verify before `accept`, too many rows, a short block table)
    raises `EngineFault` before anything is written.
    """

    dims: ModelDims

    def __init__(self, model: object, kv: KVPool, states: StatePool, config: EngineConfig) -> None:
        """`model` is `LoadedModel.model`."""

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        """Run prompt rows; returns one hidden [n, H] after the final norm a chunk.

        Writes the KV rows, leaves the slot's states valid at `start + n` with fold 0 and, with an MTP head, writes the
        draft rows start..start+n-1. Several chunks of one sequence in one call run in the order given.
        """
        raise NotImplementedError

    def verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]:
        """Run one batched, ragged verify over distinct slots; returns one hidden [T_i, H] a sequence.

        Folds the accepted rows of each slot's last verify into its state, then runs the new rows and keeps their inputs
        for the next fold. KV rows are written before attention reads them. `accept` must follow for every slot.
        """
        raise NotImplementedError

    def accept(self, slot: int, rows: int) -> None:
        """Commit the first `rows` (0..T) columns of the slot's last verify. Exactly once between two verifies."""

    def flush(self, slot: int) -> None:
        """Fold the accepted rows into the slot's state now, so that snapshots may be taken. Idempotent."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] final-normed hidden (trunk or draft) -> [R, V] float32 logits."""
        raise NotImplementedError

    def draft(self, rows: Sequence[DraftRows]) -> list[Tensor]:
        """Run MTP rows and write their draft KV; returns y [n, H] after `mtp.norm` a sequence.

        `logits(y)` of row p proposes the token at p + 1. Raises `EngineFault` when the model has no MTP head.
        """
        raise NotImplementedError
