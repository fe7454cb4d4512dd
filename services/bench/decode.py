"""`burstline bench decode`: plain decode by batch, against the floor of the same machine in the same run.

The floor is the bare forward: verify of one column a sequence, its logits and `accept`, with no scheduler, session,
sampling or cache around it. What the engine adds is the distance to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from services.bench.figures import spread
from services.bench.load import CONTEXT, Load, measure
from services.bench.spec import ARMS, PLAIN
from services.gpu_worker.engine.batch import PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.runner import ModelRunner
from shared.clock import SYSTEM
from shared.evidence import Bar

PROMPT_ROWS: Final = 3 * BLOCK_ROWS
"""About the length of the benchmark's prompts."""
FLOOR_STEPS: Final = 40
LEAST_SHARE: Final = 0.5
"""Of the floor's rate that the engine must keep with one stream."""

Results = dict[str, dict[str, Any]]


class _Floor:
    """`batch` primed sequences in pools of their own."""

    def __init__(self, model: LoadedModel, batch: int) -> None:
        blocks = CONTEXT // BLOCK_ROWS
        config = EngineConfig(
            num_blocks=batch * blocks, num_slots=batch, num_snapshots=0, max_batch=batch, max_context=CONTEXT
        )
        states = StatePool(model.dims, batch, 0, config.max_verify)
        self._runner = ModelRunner(model.model, KVPool(model.dims, config.num_blocks), states, config)
        self._tables = [range(slot * blocks, (slot + 1) * blocks) for slot in range(batch)]
        ids = [(place * 7919 + 13) % model.dims.vocab for place in range(PROMPT_ROWS)]
        for slot, table in enumerate(self._tables):
            hidden = torch.zeros(model.dims.hidden)
            chunk = PrefillChunk(slot=slot, start=0, tokens=ids, block_table=table, previous_hidden=hidden)
            self._runner.prefill([chunk])

    def rate(self) -> float:
        """Tokens a second over some forwards, each sequence with its own greedy tokens."""
        tokens = [13] * len(self._tables)
        began = SYSTEM.monotonic_ns()
        for step in range(FLOOR_STEPS):
            rows = [
                VerifyRows(slot=slot, start=PROMPT_ROWS + step, tokens=(tokens[slot],), block_table=table)
                for slot, table in enumerate(self._tables)
            ]
            logits = self._runner.logits(torch.cat(self._runner.verify(rows)))
            tokens = logits.argmax(-1).tolist()
            for row in rows:
                self._runner.accept(row.slot, 1)
        return FLOOR_STEPS * len(tokens) * 1e9 / (SYSTEM.monotonic_ns() - began)


def run_decode(
    model: LoadedModel,
    batches: Sequence[int],
    *,
    repeats: int,
    report: Callable[[str], None] = lambda _: None,
) -> Results:
    """Engine and floor in turns, so that both meet the same machine."""
    results: Results = {}
    for batch in batches:
        floors, rates = [], []
        for repeat in range(repeats):
            floors.append(_Floor(model, batch).rate())
            rates.append(measure(model, Load(rule="greedy", batch=batch), ARMS[PLAIN]).rate)
            report(f"batch {batch}: repeat {repeat + 1} of {repeats}")
        shares = [rate / floor for rate, floor in zip(rates, floors, strict=True)]
        results[f"batch {batch}"] = {
            "tokens_per_second": spread(rates, 1),
            "floor_tokens_per_second": spread(floors, 1),
            "share_of_floor": spread(shares, 3),
        }
    return results


def bars(results: Results) -> list[Bar]:
    """With one stream all is overhead or forward; in a batch, streams that end early leave it part empty."""
    return [
        Bar.at_least(
            f"plain decode over the bare forward, {name}",
            figures["share_of_floor"]["median"],
            LEAST_SHARE,
            "x",
        )
        for name, figures in results.items()
        if name == "batch 1"
    ]
