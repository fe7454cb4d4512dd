"""Rounds run whole on a card for sequences that the host fills in and reads again: one launch, one small copy back.

The host stays the one who knows where a stream stands: it fills every round's rows, walks the picks by its own rules and
commits. (`DeviceRounds` can also go on unasked; then the host reads behind it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.device_rounds import DeviceRounds
from services.gpu_worker.engine.graphs import Size, bucket, buckets
from services.gpu_worker.engine.inputs import RoundInputs
from services.gpu_worker.engine.layers.steps import Span
from services.gpu_worker.engine.models.hybrid import HybridModel
from services.gpu_worker.engine.requests import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRow:
    """One sequence of a round. Its columns are the anchor and either `given` drafts or `k` that the head makes."""

    slot: int
    start: int
    anchor: int
    block_table: Sequence[int]
    rules: SamplingParams
    choice: int
    given: Sequence[int] = ()
    k: int = 0
    catch_up: DraftRows | None = None
    """With k: rows of the draft plane up to the anchor's, which the head reads first."""
    eager: bool = False

    @property
    def columns(self) -> int:
        return 1 + (self.k or len(self.given))


class WholeResult(NamedTuple):
    """What a round decided: the drafts, the pick of every column (-1 = a broken row), hidden [columns, H]."""

    drafts: list[int]
    picks: list[int]
    hidden: Tensor


class WholeRounds:
    """`catch_up` writes rows of the draft plane that are more than a round has room for."""

    def __init__(
        self,
        model: HybridModel,
        kv: KVPool,
        states: StatePool,
        config: EngineConfig,
        blocks: int,
        catch_up: Callable[[DraftRows], object],
    ) -> None:
        self._states = states
        self._vocab = model.dims.vocab
        self._catch_up = catch_up
        self._drafts = model.mtp is not None
        device = kv.k.device
        self._inputs = RoundInputs(config.max_batch, states.max_verify, blocks, device, states.scratch)
        self._rounds = DeviceRounds(model, kv, states, self._inputs)
        self._tail = torch.zeros(
            config.max_batch, states.max_verify + 2, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self.uncaptured = False
        """Whether the last round wanted a graph that could not be captured."""
        self._seated: list[tuple[SamplingParams, int]] = []

    def prepare(self, drafts: int, report: Callable[[str], None]) -> None:
        """Capture rounds of every number of sequences with no drafts, and with `drafts` by the head."""
        sequences = buckets(self._inputs.sequences)
        self._rounds.verifies.prepare_all([(count, 1) for count in sequences], report)
        columns = min(1 + drafts, self._inputs.columns)
        if columns > 1 and self._drafts:
            self._rounds.graphs.prepare_all([(count, columns) for count in sequences], report)

    def run(self, rows: Sequence[WholeRow]) -> list[WholeResult]:
        """One round; slots are distinct. `accept` must follow for each, as after a verify."""
        drafting = any(row.k for row in rows)
        widest = max(row.columns for row in rows)
        size = (
            bucket(len(rows), self._inputs.sequences),
            widest if drafting else bucket(widest, self._inputs.columns),
        )
        graphs = self._rounds.graphs if drafting else self._rounds.verifies
        eager = any(row.eager for row in rows)
        self.uncaptured = not eager and graphs.enabled and not graphs.prepare(size)
        self._fill(rows, size)
        told = graphs.run(size, eager=eager).tolist()
        hidden = self._rounds.tail_hidden[: len(rows), : size[1]].clone()
        for row in rows:
            self._states.verified(row.slot, row.columns)
        return [
            WholeResult(
                drafts=line[size[1] : size[1] + row.columns - 1],
                picks=line[: row.columns],
                hidden=hidden[number, : row.columns],
            )
            for number, (row, line) in enumerate(zip(rows, told, strict=False))
        ]

    def _fill(self, rows: Sequence[WholeRow], size: Size) -> None:
        spans = [Span(row.start, row.columns, row.block_table) for row in rows]
        ids = [[row.anchor, *row.given, *(0,) * row.k] for row in rows]
        self._tail.zero_()
        for number, row in enumerate(rows):
            self._tail[number, -1] = not row.k
            if row.catch_up is not None:
                self._take(number, row.catch_up, size[1])
        self._inputs.fill(spans, ids, size, [row.slot for row in rows], self._states)
        rounds, most = self._rounds, self._inputs.columns
        told = self._tail.to(rounds.given.device, non_blocking=True)
        rounds.tail_tokens.copy_(told[:, :most])
        rounds.tail_counts.copy_(told[:, most])
        rounds.given.copy_(told[:, most + 1])
        seats = [(row.rules, row.choice) for row in rows]
        if seats != self._seated:
            self._seated = seats
            rounds.rules.fill([row.rules for row in rows], [row.choice for row in rows], vocab=self._vocab)

    def _take(self, number: int, catch_up: DraftRows, columns: int) -> None:
        """Hand a sequence's last `columns` rows to the round; what is before them is written now."""
        count = len(catch_up.tokens)
        spare = max(0, count - columns)
        if spare:
            self._catch_up(
                DraftRows(
                    start=catch_up.start,
                    tokens=catch_up.tokens[:spare],
                    hiddens=catch_up.hiddens[:spare],
                    block_table=catch_up.block_table,
                )
            )
        tokens = torch.tensor(catch_up.tokens[spare:], dtype=torch.int32)
        self._tail[number, : len(tokens)] = tokens
        self._tail[number, -2] = len(tokens)
        self._rounds.tail_hidden[number, : len(tokens)] = catch_up.hiddens[spare:].to(
            self._rounds.tail_hidden.device, self._rounds.tail_hidden.dtype
        )
