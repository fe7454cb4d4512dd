"""A runner whose launches break when the fault hooks say so. Built only for an engine that was given hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from services.gpu_worker.engine.batch import BlockAsk, DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.card_logits import Logits
from services.gpu_worker.engine.faults import Faults, StreamKey
from services.gpu_worker.engine.flights import WholeResult, WholeRow
from services.gpu_worker.engine.models.block_heads import Proposal
from services.gpu_worker.engine.runner import ModelRunner


class FaultyRunner:
    """The runner's calls, each told to `faults` after its rows are written. `names` = which stream has which slot."""

    def __init__(
        self, runner: ModelRunner, faults: Faults, names: Callable[[], Mapping[int, StreamKey]]
    ) -> None:
        self._runner = runner
        self._faults = faults
        self._names = names

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        hiddens = self._runner.prefill(chunks)
        self._faults.launched("prefill", self._streams(chunks))
        return hiddens

    def verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]:
        hiddens = self._runner.verify(rows)
        self._faults.launched("verify", self._streams(rows))
        return hiddens

    @property
    def uncaptured(self) -> bool:
        return self._runner.uncaptured

    @property
    def runs_whole(self) -> bool:
        return self._runner.runs_whole

    def whole(self, rows: Sequence[WholeRow], *, more: bool = False) -> list[WholeResult]:
        results = self._runner.whole(rows, more=more)
        self._faults.launched("verify", self._streams(rows))
        return results

    def land(self, but: Collection[int] = ()) -> None:
        self._runner.land(but)

    def accept(self, slot: int, rows: int) -> None:
        self._runner.accept(slot, rows)

    def flush(self, slot: int) -> None:
        self._runner.flush(slot)

    def draft(self, rows: Sequence[DraftRows]) -> list[Tensor]:
        return self._runner.draft(rows)

    def propose(self, asks: Sequence[BlockAsk]) -> list[Proposal]:
        return self._runner.propose(asks)

    def logits(self, hidden: Tensor) -> Logits:
        return self._runner.logits(hidden)

    def _streams(
        self, launched: Sequence[PrefillChunk] | Sequence[VerifyRows] | Sequence[WholeRow]
    ) -> list[StreamKey]:
        names = self._names()
        return [names[item.slot] for item in launched]
