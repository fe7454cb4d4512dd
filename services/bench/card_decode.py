"""`burstline bench decode --device cuda`: steps and verifies of a shape on a card, one at a time, against the bytes that
must move. (`card_spec` has rounds that follow one another, as in a burst.)

A step is what a round really costs: the host fills the inputs, a graph runs trunk, head and pick, and the picks come back
in one copy; states are stored every few rows as the engine does it. The first step of every repeat is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kernels import sampling
from services.bench.card import (
    Ceilings,
    blocks_for,
    pools,
    step_bytes,
    tables,
    timed,
    weight_item,
)
from services.bench.card_record import Row, ignored
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.graphs import GraphCache, Size
from services.gpu_worker.engine.layers.steps import Span
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.placement import CARD_FOLD_ROWS
from services.gpu_worker.engine.rounds import CardLaunches
from shared.clock import SYSTEM
from shared.evidence import Bar

CONTEXT: Final = 512
"""Rows that every sequence starts with."""

STEPS: Final = 11 * CARD_FOLD_ROWS
"""Rounds that are timed: whole periods of the fold."""

VERIFY_LIMIT: Final = {4: 1.05, 8: 1.08, 16: 1.12}


@dataclass
class Decoder:
    """`batch` sequences in pools of their own, and graphs of rounds over them."""

    loaded: LoadedModel
    batch: int
    columns: int
    launches: CardLaunches = field(init=False)

    def __post_init__(self) -> None:
        context = CONTEXT + STEPS * 4 * self.columns + 64
        config = EngineConfig(
            num_blocks=self.batch * blocks_for(context),
            num_slots=self.batch,
            num_snapshots=0,
            max_verify=self.columns,
            max_batch=self.batch,
            max_context=context,
        )
        self._kv, self.states = pools(self.loaded, config)
        ring = RingPool(
            self.loaded.dims, self.batch, 0, prefill_rows=config.prefill_chunk, max_verify=self.columns
        )
        self.launches = CardLaunches(self.loaded.model, self._kv, self.states, ring, config)
        self._tables = tables(self.batch, blocks_for(context))
        self._plans = {
            columns: sampling.PickPlan.empty(self.batch, columns, device="cuda", truncate=False)
            for columns in (1, 2, 4, 8, 16)
        }
        self._picks = torch.zeros(self.batch * self.columns, dtype=torch.int32, pin_memory=True)
        self.graphs: GraphCache[Size] = GraphCache(self._launch, self.launches.clear, enabled=True)

    @torch.no_grad()
    def steps(self, size: Size, count: int, accepted: int) -> tuple[list[float], list[float]]:
        """Run rounds in which every sequence accepts `accepted` rows: (seconds a round, seconds of it in the host's own
        work)."""
        batch, columns = size
        for slot in range(batch):
            self.states.reset_position(slot)
        tokens = [[(7919 * (s + t)) % self.loaded.dims.vocab for t in range(columns)] for s in range(batch)]
        slots, at, times, host = list(range(batch)), CONTEXT, [], []
        for _ in range(count):
            began = SYSTEM.monotonic_ns()
            spans = [Span(at, columns, self._tables[slot]) for slot in slots]
            self.launches.inputs.fill(spans, tokens, size, slots, self.states)
            picks = self.graphs.run(size)
            self._picks[: batch * columns].copy_(picks, non_blocking=True)
            launched = SYSTEM.monotonic_ns()
            torch.cuda.current_stream().synchronize()
            done = SYSTEM.monotonic_ns()
            got = self._picks[: batch * columns].view(batch, columns).tolist()
            for slot in slots:
                self.states.verified(slot, columns)
                self.states.accept(slot, accepted)
            tokens = [[max(0, token) for token in row] for row in got]
            at += accepted
            ended = SYSTEM.monotonic_ns()
            times.append((ended - began) / 1e9)
            host.append((ended - began - (done - launched)) / 1e9)
        return times[1:], host[1:]

    def prepare(self, size: Size) -> bool:
        """Capture; False when that was not possible."""
        with torch.no_grad():
            return self.graphs.prepare(size)

    def _launch(self, size: Size) -> torch.Tensor:
        hidden = self.launches.launch_verify(size)
        logits = self.loaded.model.logits(hidden)
        plan = self._plans[size[1]]
        return sampling.pick(logits, plan.of(plan.starts[: size[0]], plan.columns)).ids


def run_card_decode(
    loaded: LoadedModel,
    ceilings: Ceilings,
    batches: Sequence[int],
    columns: Sequence[int],
    *,
    row: Row = ignored,
) -> dict[str, Any]:
    """Figures by size: milliseconds a round, of the device alone, of the host's work, and the floor."""
    decoder = Decoder(loaded, max(batches), max((1, *columns)))
    results: dict[str, Any] = {}
    for size in [(b, 1) for b in batches] + [(1, t) for t in columns if t > 1]:
        held = decoder.prepare(size)
        times, host = decoder.steps(size, STEPS, 1)
        device = timed(lambda size=size: decoder.graphs.run(size), repeats=16)  # type: ignore[misc]
        item = weight_item(loaded.model.recipe)
        floor = (
            step_bytes(loaded.dims, size[0], CONTEXT, size[1], weight_item=item) / ceilings.copy_bytes_per_s
        )
        name = f"{size[0]} x {size[1]}"
        results[name] = {
            "round_ms": round(statistics.median(times) * 1e3, 3),
            "mean_round_ms": round(statistics.fmean(times) * 1e3, 3),
            "longest_ms": [round(one * 1e3, 2) for one in sorted(times)[-3:]],
            "graph_ms": round(device * 1e3, 3),
            "host_ms": round(statistics.median(host) * 1e3, 3),
            "floor_ms": round(floor * 1e3, 3),
            "over_floor": round(statistics.fmean(times) / floor, 3),
            "graph": held,
        }
        row(name, results[name])
    return results


def bars(results: dict[str, Any]) -> list[Bar]:
    """The promises for the 27B shape."""
    told = []
    for columns, limit in VERIFY_LIMIT.items():
        if f"1 x {columns}" in results and "1 x 1" in results:
            ratio = results[f"1 x {columns}"]["mean_round_ms"] / results["1 x 1"]["mean_round_ms"]
            told.append(
                Bar.at_most(f"verify of {columns} columns over a plain step", round(ratio, 3), limit, "x")
            )
    return told
