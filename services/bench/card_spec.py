"""Speculation of a shape on a card: whole rounds of K drafts, verify, pick and walk against plain steps of the same run.

Random weights never accept a draft, so how many stand is decreed, round by round, to a mean of 2.8 tokens: on the card, by
launches of the same graph, so that the host's work is what it is without. Every figure that depends on it says *synthetic*;
the engine has no such switch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from services.bench.card import blocks_for, pools, tables, timed
from services.bench.card_record import Row, ignored
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.device_rounds import DeviceRounds
from services.gpu_worker.engine.flights import By, Round
from services.gpu_worker.engine.graphs import GraphCache, Size
from services.gpu_worker.engine.inputs import RoundInputs
from services.gpu_worker.engine.layers.steps import Span
from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.hybrid import HybridModel
from services.gpu_worker.engine.models.loader import LoadedModel
from shared.clock import SYSTEM
from shared.evidence import Bar

CONTEXT: Final = 512
ROUNDS: Final = 60
PATTERN: Final = (2, 2, 1, 2, 2)
"""Decreed accepted drafts: with the target's own token 2.8 a round."""
DRAFTS: Final = 3

STEP_LIMIT_MS: Final = {1: 14.8, 8: 15.3, 16: 15.8, 64: 18.6}
ROUND_LIMIT: Final = 1.14
BOUNDARY_LIMIT: Final = 1.02
RATE_LEAST: Final = {1: 165.0, 16: 2100.0}
HOST_LIMIT_MS: Final = 0.3


@dataclass
class Speculator:
    """`batch` sequences whose rounds run whole on the card."""

    loaded: LoadedModel
    batch: int
    columns: int = DRAFTS + 1
    drafter: BlockDrafter | None = None
    """Who drafts; null = the head."""
    rounds: DeviceRounds = field(init=False)

    def __post_init__(self) -> None:
        context = CONTEXT + (ROUNDS + 40) * self.columns
        config = EngineConfig(
            num_blocks=self.batch * blocks_for(context),
            num_slots=self.batch,
            num_snapshots=0,
            max_verify=self.columns,
            max_batch=self.batch,
            max_context=context,
        )
        kv, self._states = pools(self.loaded, config)
        inputs = RoundInputs(self.batch, self.columns, blocks_for(context), kv.k.device, self._states.scratch)
        assert isinstance(self.loaded.model, HybridModel)
        block = None
        if self.drafter is not None:
            block = BlockContext(self.drafter, self.loaded.model, num_slots=self.batch, num_snapshots=0)
            block.ring.k.normal_()
            block.ring.v.normal_()
        self.rounds = DeviceRounds(self.loaded.model, kv, self._states, inputs, block=block, truncate=False)
        self._tables = tables(self.batch, blocks_for(context))
        width = 2 * self.columns + (self.drafter is not None)
        self._told = torch.zeros(2, self.batch, width, dtype=torch.int32, pin_memory=True)
        self._done = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        pattern = [[min(accepted, self.columns - 1)] * self.batch for accepted in PATTERN]
        self._pattern = torch.tensor(pattern, dtype=torch.int32, device="cuda")
        self._turn = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.rounds.forced = torch.zeros(self.batch, dtype=torch.int32, device="cuda")
        self.graphs: GraphCache[Size] = GraphCache(self._decreed, self.rounds.clear, enabled=True)

    @torch.no_grad()
    def _decreed(self, size: Size) -> torch.Tensor:
        """A round before which it is decreed how many drafts stand: what no engine does."""
        assert self.rounds.forced is not None
        torch.index_select(self._pattern, 0, self._turn, out=self.rounds.forced.view(1, -1))
        self._turn.add_(1).remainder_(len(PATTERN))
        if self.drafter is not None:
            return self.rounds.launch(Round(*size, block=True))
        return self.rounds.launch(Round(*size, head=size[1] - 1))

    def begin(self, size: Size) -> None:
        """Capture, then put every sequence at the start."""
        sequences, columns = size
        self.graphs.prepare(size)
        slots = list(range(sequences))
        for slot in slots:
            self._states.reset_position(slot)
        spans = [Span(CONTEXT, columns, self._tables[slot]) for slot in slots]
        self.rounds.inputs.fill(spans, [[7] * columns] * sequences, size, slots, self._states)
        self.rounds.state.tail_counts[:sequences] = 1
        self.rounds.state.tail_hidden.normal_()
        self.rounds.state.left[:sequences] = 1 << 20
        self.rounds.state.wide[:sequences] = columns
        self.rounds.told.by[:sequences] = By.HEAD if self.drafter is None else By.BLOCK
        self.rounds.told.unread[:sequences] = 1
        self.rounds.tail_taps.normal_()

    def run(self, size: Size, count: int, *, overlapped: bool) -> tuple[float, list[float]]:
        """Seconds a round, and for each round the seconds of the host's own work: the launch, and what is read of it.
        Overlapped: a round is launched before the one before it is read, as inside a burst."""
        host, began = [0.0] * count, SYSTEM.monotonic_ns()
        for number in range(count):
            started = SYSTEM.monotonic_ns()
            self._launch(size, number)
            host[number] += (SYSTEM.monotonic_ns() - started) / 1e9
            read = number - 1 if overlapped else number
            if read >= 0:
                host[read] += self._read(size, read)
        if overlapped:
            host[-1] += self._read(size, count - 1)
        return (SYSTEM.monotonic_ns() - began) / 1e9 / count, host

    @torch.no_grad()
    def _launch(self, size: Size, number: int) -> None:
        told = self.graphs.run(size)
        self._told[number % 2, : size[0]].copy_(told, non_blocking=True)
        self._done[number % 2].record()

    def _read(self, size: Size, number: int) -> float:
        """Wait for a round, then do what a host does with it: seconds of the latter."""
        self._done[number % 2].synchronize()
        started = SYSTEM.monotonic_ns()
        streams: list[list[int]] = []
        for row in self._told[number % 2, : size[0]].tolist():
            streams.append(row[: row[2 * size[1] - 1]])
        return (SYSTEM.monotonic_ns() - started) / 1e9


def run_card_spec(
    loaded: LoadedModel, batches: Sequence[int], *, drafter: BlockDrafter | None = None, row: Row = ignored
) -> dict[str, Any]:
    """By batch: a plain round and a round of K drafts, both run whole on the card, and tokens a second of both; of a block
    `drafter` as well, whose rounds bring as many tokens by the same decree."""
    results: dict[str, Any] = {}
    for batch in batches:
        plain = _measured(loaded, (batch, 1))
        round_ = _measured(loaded, (batch, DRAFTS + 1))
        tokens = 1 + statistics.fmean(PATTERN)
        results[f"batch {batch}"] = {
            "plain": plain,
            "mtp": round_,
            "tokens_a_round_synthetic": tokens,
            "drafts": DRAFTS,
            "round_over_plain": round(round_["in_burst_ms"] / plain["in_burst_ms"], 3),
            "plain_tokens_per_s": round(batch / plain["in_burst_ms"] * 1e3, 1),
            "mtp_tokens_per_s_synthetic": round(batch * tokens / round_["in_burst_ms"] * 1e3, 1),
            "boundary_over_round": round(round_["boundary_ms"] / round_["in_burst_ms"], 4),
        }
        if drafter is not None:
            size = batch, 1 + drafter.dims.drafts
            block = _measured(loaded, size, drafter)
            results[f"batch {batch}"] |= {
                "block": block,
                "block_over_plain": round(block["in_burst_ms"] / plain["in_burst_ms"], 3),
                "block_tokens_per_s_synthetic": round(batch * tokens / block["in_burst_ms"] * 1e3, 1),
            }
        row(f"batch {batch}", results[f"batch {batch}"])
    return results


def _measured(loaded: LoadedModel, size: Size, drafter: BlockDrafter | None = None) -> dict[str, float]:
    speculator = Speculator(loaded, size[0], size[1], drafter)
    speculator.begin(size)
    speculator.run(size, 5, overlapped=True)
    inside, overlapped = speculator.run(size, ROUNDS // 2, overlapped=True)
    boundary, alone = speculator.run(size, ROUNDS // 2, overlapped=False)
    device = timed(lambda: speculator.graphs.run(size), repeats=10)
    return {
        "in_burst_ms": round(inside * 1e3, 3),
        "boundary_ms": round(boundary * 1e3, 3),
        "graph_ms": round(device * 1e3, 3),
        "host_ms": round(statistics.fmean(alone) * 1e3, 4),
        "host_median_ms": round(statistics.median(alone) * 1e3, 4),
        "host_in_burst_ms": round(statistics.median(overlapped) * 1e3, 4),
    }


def bars(results: dict[str, Any]) -> list[Bar]:
    """The promises for the 27B shape."""
    told = []
    for batch, limit in STEP_LIMIT_MS.items():
        if f"batch {batch}" in results:
            value = results[f"batch {batch}"]["plain"]["in_burst_ms"]
            told.append(Bar.at_most(f"plain step, batch {batch}", value, limit, "ms"))
    for batch, least in RATE_LEAST.items():
        figures = results.get(f"batch {batch}")
        if figures is not None:
            rate = figures["mtp_tokens_per_s_synthetic"]
            told.append(Bar.at_least(f"tokens at 2.8 a round (synthetic), batch {batch}", rate, least, "1/s"))
    one = results.get("batch 1")
    if one is not None:
        told += [
            Bar.at_most("MTP round over a plain step", one["round_over_plain"], ROUND_LIMIT, "x"),
            Bar.at_most("burst boundary over a round", one["boundary_over_round"], BOUNDARY_LIMIT, "x"),
            Bar.at_most("host work of a round", one["mtp"]["host_ms"], HOST_LIMIT_MS, "ms"),
        ]
    many = results.get("batch 64")
    if many is not None:
        gain = many["mtp_tokens_per_s_synthetic"] / many["plain_tokens_per_s"]
        told.append(Bar.at_least("speculation over none (synthetic), batch 64", round(gain, 3), 1.0, "x"))
    return told
